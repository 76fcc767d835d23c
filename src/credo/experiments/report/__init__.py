"""Our numbers beside the published ones: in the terminal, as Markdown, and as one self-contained HTML page.

results = load_results(out)
tables = report.tables(results)              # one for each recipe and size, mean ± sd over seeds
report.terminal(console, tables)             # rich
text = report.markdown(tables)
page = report.html(tables, report.pictures(results))
written = report.write(out, results)         # report.md, report.html and figures/*.png, *.svg; their paths
"""

from credo.experiments.report.aggregate import Cell
from credo.experiments.report.markdown import markdown
from credo.experiments.report.page import Picture, html
from credo.experiments.report.tables import Line, Table, tables
from credo.experiments.report.terminal import terminal
from credo.experiments.report.write import pictures, write

__all__ = ["Cell", "Line", "Table", "Picture", "tables", "terminal", "markdown", "html", "pictures", "write"]
