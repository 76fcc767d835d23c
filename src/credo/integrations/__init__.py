"""Inside the loops of other libraries; each module needs the extra of its name."""
