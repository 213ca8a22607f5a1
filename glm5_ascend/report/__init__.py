"""Shared by the HTML reports: one self-contained page, its charts, header and verdict."""
