"""Other libraries' names and signatures on Fretwork's ops, for code that was written for them."""
