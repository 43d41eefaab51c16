"""Everything that is checked; see scripts/test."""
