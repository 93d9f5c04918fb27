-- For wrk: acts of many sessions at once, each session `acts` requests long, as episodes are.
-- Arguments: name of the run, sessions at a time, acts per session, file with one JSON of observations per line.
-- The last line of the output is one JSON object.
local name, live, acts
local bodies, head, sent = {}, "", 0

function init(args)
   name, live, acts = args[1], tonumber(args[2]), tonumber(args[3])
   for line in io.lines(args[4]) do bodies[#bodies + 1] = line end
   head = "POST " .. wrk.path .. " HTTP/1.1\r\nHost: " .. wrk.host .. ":" .. wrk.port
      .. "\r\nContent-Type: application/json\r\nContent-Length: "
end

function request()
   local session = name .. "-" .. sent % live .. "-" .. math.floor(sent / (live * acts))
   sent = sent + 1
   local body = '{"session_id":"' .. session .. '","observations":' .. bodies[sent % #bodies + 1] .. "}"
   return head .. #body .. "\r\n\r\n" .. body
end

function done(summary, latency)
   local e = summary.errors
   io.write(string.format(
      '\n{"requests": %d, "seconds": %.6f, "errors": %d, "p50_ms": %.4f, "p99_ms": %.4f}\n',
      summary.requests, summary.duration / 1e6, e.connect + e.read + e.write + e.status + e.timeout,
      latency:percentile(50) / 1e3, latency:percentile(99) / 1e3
   ))
end
