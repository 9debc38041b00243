"""The command `acclight`."""
