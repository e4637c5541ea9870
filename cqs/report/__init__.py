"""What W workers hold, take and gain on this machine: measured rows, tables and a page."""
