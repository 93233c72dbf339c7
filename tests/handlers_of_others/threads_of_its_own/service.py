import queue
import threading
from concurrent.futures import ThreadPoolExecutor

pool = ThreadPoolExecutor(max_workers=4)
tasks = queue.Queue()
done = queue.Queue()


def forever():
    while True:
        done.put(tasks.get()[::-1])


threading.Thread(target=forever, daemon=True).start()


def handle(data, context):
    if data is None:
        return None
    tasks.put(data[0]["body"])
    squares = list(pool.map(lambda number: number * number, range(10)))
    return ["{} {}".format(done.get(timeout=10), sum(squares))]
