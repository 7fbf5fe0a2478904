def timed_batches(batches, clock, waits):
    start = clock()  # before iter(): starting worker processes is waiting, too
    for batch in batches:
        waits.append(clock() - start)
        yield batch
        start = clock()  # the consumer has computed meanwhile; that is not waiting
