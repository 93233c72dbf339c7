WORD = "found later"
