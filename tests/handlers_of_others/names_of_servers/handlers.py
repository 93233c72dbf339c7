WORD = "handlers"
