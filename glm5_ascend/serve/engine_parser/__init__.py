"""The parser of an installed engine. It imports nothing else of this package: other environments run it, too."""

from pathlib import Path

#: Name of this package for an interpreter that runs it without the rest, and its folder.
NAME, FOLDER = "glm5_parser", Path(__file__).parent
