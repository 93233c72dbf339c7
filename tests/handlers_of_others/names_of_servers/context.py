WORD = "context"
