-- The spine: receipts, logs, heads, scratchpads.
--
-- Ids are text, up to 128 bytes; the hot tables name a workflow by the small integer that its receipt gave it, so
-- that a step's rows are short and the rows of workflows that run together lie together. A namespace is a small
-- integer for the same reason and opens every primary key.
-- Measured beside other layouts in docs/decisions/2026-12-01-sqlite-key-layout.md.

-- One row: what this file is. Updated when the file is opened (boot, file_id) and after a restore (epoch).
create table store (
    one integer primary key check (one = 1),
    epoch integer not null check (epoch > 0),           -- raised on restore: claims of earlier epochs are void
    boot integer not null check (boot >= 0),            -- counts the owners of this file
    file_id text not null,                              -- which file this was when it was last opened: a copy shows
    copy integer not null check (copy in (0, 1)),       -- 1 in a backup: whoever opens it raises the epoch
    number_floor integer not null default 0,            -- workflow numbers up to here were used, heads or no heads
    fingerprint_key blob not null check (length(fingerprint_key) = 32),
    created_at integer not null
) strict;

-- Append only.
create table namespaces (
    namespace integer primary key,
    name text not null unique
) strict;

insert into namespaces (namespace, name) values (1, 'default');

-- Receipts of starts. Append only; they outlive their workflow.
create table admissions (
    namespace integer not null,
    id text not null,
    workflow integer not null,                          -- the number of the workflow, never used again
    fingerprint blob not null check (length(fingerprint) = 33),
    admitted_at integer not null,
    primary key (namespace, id)
) strict, without rowid;

-- Logs. Append only. A table in the order of commits with its key beside it: a commit of many workflows then
-- fills few pages, where rows in key order would touch a page for each workflow.
create table events (
    namespace integer not null,
    workflow integer not null,
    seq integer not null check (seq >= 0),
    type text not null,
    version integer not null,
    at integer not null,
    payload text not null,
    primary key (namespace, workflow, seq)              -- the lock: one event a position
) strict;

-- The current state of each workflow: derived from its log, saved with it, rebuilt from it by verify.
create table heads (
    namespace integer not null,
    workflow integer not null,
    id text not null,
    name text not null,
    options text,                                       -- null: the defaults
    priority integer not null,
    created_at integer not null,
    updated_at integer not null,
    seq integer not null,
    status text not null,
    code text,                                          -- why it failed
    step text,
    visit integer,
    attempt integer,
    delivery integer,
    rank integer,                                       -- place in the claim order, while ready
    wake integer,                                       -- 0 lease, 1 timer, while it waits for time
    due integer,
    token blob,                                         -- the open claim, while running
    epoch integer,
    worker text,
    boot integer,
    remote integer,
    started_at integer,
    lease_ms integer,
    lease_until integer,
    step_deadline integer,
    progress text,
    wait text,                                          -- JSON: for which signals, while waiting
    primary key (namespace, workflow),
    -- No lists longer than two: SQLite would build one anew at every update.
    check (status = 'ready' or status = 'sleeping' or status = 'running' or status = 'backoff'
        or status = 'waiting' or status = 'completed' or status = 'failed' or status = 'cancelled'),
    check ((status = 'completed' or status = 'failed' or status = 'cancelled') = (step is null)),
    check ((step is null) = (visit is null) and (step is null) = (attempt is null) and (step is null) = (delivery is null)),
    check ((status = 'ready') = (rank is not null)),
    check (status = 'waiting' or (status = 'sleeping' or status = 'backoff' or status = 'running') = (due is not null)),
    check ((status = 'waiting') = (wait is not null)),
    check ((due is null) = (wake is null)),
    check ((status = 'running') = (token is not null)),
    check ((status = 'failed') = (code is not null))
) strict, without rowid;

-- Claims: the next ready step that a worker knows.
create index heads_ready on heads (namespace, name, step, rank) where rank is not null;
-- Sweeps: whose time has come; and all open claims, for giving them back.
create index heads_timed on heads (wake, due) where due is not null;
-- Lists of one definition, newest first.
create index heads_by_name on heads (namespace, name, workflow);
-- Lists of what ended badly: few rows, often looked for.
create index heads_ended_badly on heads (namespace, status, workflow) where status in ('failed', 'cancelled');

-- The current value of each variable of each workflow, saved with the commit that wrote it.
create table scratchpad (
    namespace integer not null,
    workflow integer not null,
    key text not null,
    value text not null,
    seq integer not null,
    primary key (namespace, workflow, key)
) strict, without rowid;

-- Inboxes: a receipt for each signal, in the order of acceptance, and its payload until a wait has taken it.
create table signals (
    namespace integer not null,
    workflow integer not null,
    number integer not null check (number > 0),         -- its place in the inbox
    id text not null,
    name text not null,
    accepted_at integer not null,
    fingerprint blob not null check (length(fingerprint) = 33),
    seq integer,                                        -- the event that took it
    payload text,                                       -- null once it was taken: the log has it
    primary key (namespace, workflow, number),
    check ((seq is null) = (payload is not null))
) strict, without rowid;
create unique index signals_by_id on signals (namespace, workflow, id);
-- What waits can take, by name; and all of it, in order.
create index signals_pending on signals (namespace, workflow, name, number) where seq is null;
create index signals_inbox on signals (namespace, workflow, number) where seq is null;

-- What claim calls with a request id were given, so that a call whose answer was lost can be repeated.
-- Deleted by age.
create table claim_calls (
    namespace integer not null,
    request text not null,
    at integer not null,
    granted text not null,                              -- JSON: [[id, seq], ..]
    primary key (namespace, request)
) strict, without rowid;
create index claim_calls_by_age on claim_calls (at);

-- For people with a database shell: logs and variables by id.
create view workflow_events as
    select n.name as namespace, h.id as workflow_id, e.seq, e.type, e.payload,
           strftime('%Y-%m-%dT%H:%M:%fZ', e.at / 1000.0, 'unixepoch') as at
    from events e
    join heads h on h.namespace = e.namespace and h.workflow = e.workflow
    join namespaces n on n.namespace = e.namespace;
create view workflow_signals as
    select n.name as namespace, h.id as workflow_id, s.number, s.name, s.id as signal_id, s.payload, s.seq,
           strftime('%Y-%m-%dT%H:%M:%fZ', s.accepted_at / 1000.0, 'unixepoch') as accepted_at
    from signals s
    join heads h on h.namespace = s.namespace and h.workflow = s.workflow
    join namespaces n on n.namespace = s.namespace;
create view workflow_variables as
    select n.name as namespace, h.id as workflow_id, s.key, s.value, s.seq
    from scratchpad s
    join heads h on h.namespace = s.namespace and h.workflow = s.workflow
    join namespaces n on n.namespace = s.namespace;
