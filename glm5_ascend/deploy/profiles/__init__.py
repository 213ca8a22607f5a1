"""Deploy profiles: which flags and variables go together on which machine. Data in deploy/profiles, read here."""
