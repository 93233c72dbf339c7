import re


class Tokenizer:
    def tokens(self, text):
        return re.findall(r"\w+", text.lower())
