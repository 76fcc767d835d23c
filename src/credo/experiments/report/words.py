"""The words of a report that terminal, Markdown and HTML share."""

from credo.experiments.report.tables import Table

SIZES = {"cpu": "CPU size", "paper": "the paper's size"}


def heading(table: Table) -> str:
    """'VOGN and the prior variance (Figure 8: …), CPU size: LeNet-5 on CIFAR-10, 10,000 training examples'."""
    source = f" ({table.source})" if table.source else ""
    size = SIZES.get(table.size, table.size)
    return f"{table.title}{source}{f', {size}' if size else ''}: {table.problem}"
