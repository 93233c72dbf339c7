WORD = "utils"
