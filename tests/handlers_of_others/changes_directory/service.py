import os


def handle(data, context):
    if data is None:
        with open("assets/here.txt") as f:
            assert f.read() == "in the model directory\n"
        os.chdir("assets")
        return None
    import later

    with open("here.txt") as f:
        return [f.read().strip() + ", " + later.WORD]
