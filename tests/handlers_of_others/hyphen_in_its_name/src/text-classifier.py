from thresholds import POSITIVE


def classify(data, context):
    if data is None:
        return None
    return ["positive" if row["body"].count("good") >= POSITIVE else "negative" for row in data]
