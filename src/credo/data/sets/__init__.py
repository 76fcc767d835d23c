"""One data set family a file: from a verified folder to `Splits`."""
