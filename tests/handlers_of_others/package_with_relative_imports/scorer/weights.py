SEPARATOR = "+"
OF = {"one": 1, "two": 2}
