"""Files: what anybody may have made is read within limits, what travels with the package found, ours written whole."""
