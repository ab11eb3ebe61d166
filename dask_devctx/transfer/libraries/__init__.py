"""How each library's arrays are located and moved; imported when a value of theirs appears."""
