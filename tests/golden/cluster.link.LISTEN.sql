LISTEN "flotilla"
