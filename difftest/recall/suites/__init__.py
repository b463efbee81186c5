"""The conversations of the live-server verification suite, one file each."""
