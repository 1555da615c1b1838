"""Chat templates that ship with the package."""
