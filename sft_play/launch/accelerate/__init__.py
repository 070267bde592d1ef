"""accelerate's configuration and its launcher's variables, read (`reading`); that file written here (`writing`)."""
