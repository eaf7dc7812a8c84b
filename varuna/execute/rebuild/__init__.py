"""Leave one generation of a job and enter the next one in the same process."""
