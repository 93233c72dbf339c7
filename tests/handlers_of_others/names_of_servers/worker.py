WORD = "worker"
