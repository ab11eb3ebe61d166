"""How to locate and move each library's arrays; imported when a value of the library appears."""
