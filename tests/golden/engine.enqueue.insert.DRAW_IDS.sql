SELECT nextval('"flotilla".runs_id_seq') FROM generate_series(1, %(count)s)
