"""Everything that keeps strangers out of a job: its credential, encrypted sockets and the job's store."""
