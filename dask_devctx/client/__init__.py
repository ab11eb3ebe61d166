"""Code for the client's process: clusters on this machine, and reports."""
