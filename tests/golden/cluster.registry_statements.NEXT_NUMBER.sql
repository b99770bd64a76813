SELECT nextval('"flotilla".instance_numbers')
