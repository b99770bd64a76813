SELECT DISTINCT r.instance_id
FROM "flotilla".runs AS r
WHERE r.state = 'running'
  AND NOT EXISTS (SELECT FROM "flotilla".instances AS i WHERE i.id = r.instance_id AND i.state <> 'gone')
