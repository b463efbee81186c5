"""The differential tests themselves: `pytest --pyargs difftest.suite`."""
