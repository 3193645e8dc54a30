"""`weft` whose consumers at Kafka are given up after 3 s of silence, and which asks for the lag every 0.2 s.

Brokers may refuse less than 6 s, so that no user can choose it; the broker of the tests does not.
"""

import sys

from weft.cli.__main__ import main
from weft.jobs import stream
from weft.jobs.brokers import kafka

kafka._MIN_SESSION_S = 3.0
stream._LAG_INTERVAL_S = 0.2

if __name__ == "__main__":
    sys.exit(main())
