"""Shared by reports: their HTML page and where they come from, tables and quantities on the terminal."""
