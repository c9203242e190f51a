"""One change at a time: measured, kept or reverted, and written down."""
