SELECT nextval('"flotilla".instance_ids')
