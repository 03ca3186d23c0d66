"""One file for each method; folders where methods share private parts."""
