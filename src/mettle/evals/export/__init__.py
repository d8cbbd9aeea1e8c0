"""A saved evaluation in other forms: one page for a browser, or a table."""
