"""Our numbers beside the published ones: in the terminal, as Markdown, and as one self-contained HTML page.

results = load_results(out)
tables = report.tables(results)              # one for each recipe and size, mean ± sd over seeds
report.terminal(console, tables)             # rich
text = report.markdown(tables)
page = report.html(tables, report.pictures(results))
written = report.write(out, results)         # report.md, report.html and figures/*.png, *.svg; their paths
text = report.write_table(folder, results)   # of one recipe and size: table.md and its figures
results = report.load_records("results")     # of runs whose folders are not here
written = report.write_page("results", "docs/results.md")    # the page of the project, and its figures
"""

from credo.experiments.report.page import Picture, html, pictures, write, write_table
from credo.experiments.report.render import markdown, terminal
from credo.experiments.report.results_page import results_page, write_page
from credo.experiments.report.stored import StoredResult, load_records
from credo.experiments.report.tables import Cell, Line, Table, tables

__all__ = [
    "Cell",
    "Line",
    "Table",
    "Picture",
    "tables",
    "terminal",
    "markdown",
    "html",
    "pictures",
    "write",
    "write_table",
    "StoredResult",
    "load_records",
    "results_page",
    "write_page",
]
