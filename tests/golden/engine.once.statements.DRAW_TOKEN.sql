SELECT nextval('"flotilla".once_tokens')
