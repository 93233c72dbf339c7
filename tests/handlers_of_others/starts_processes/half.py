def of(number):
    return number // 2
