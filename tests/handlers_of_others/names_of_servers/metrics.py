WORD = "metrics"
