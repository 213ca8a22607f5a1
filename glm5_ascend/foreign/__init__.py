"""Files and answers that anybody may have made: read within limits, refused in one line."""
