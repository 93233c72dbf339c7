WORD = "server"
