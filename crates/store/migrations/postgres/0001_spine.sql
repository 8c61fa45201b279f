-- The spine: receipts, logs, heads, scratchpads.
--
-- Ids are text, up to 128 bytes; the hot tables name a workflow by the number that its receipt gave it, so that a
-- step's rows are short. That number is unique in the whole store and opens the key of everything that belongs to a
-- workflow: it is what those rows can be distributed by. A namespace is a small number too, and opens the other keys.
-- Text that orders is compared byte for byte, as SQLite does.
--
-- Payloads are text and not jsonb, which would write numbers anew and lose keys: what was sent is what is kept.
-- There are no foreign keys, and no checks on the hot tables: a check is read anew from the catalogue by every statement.
-- The rules that they would repeat stand in one place in the code, and verify proves them from the logs.

-- One row: what this store is.
create table {schema}.store (
    one boolean primary key default true check (one),
    version integer not null,                           -- of the schema
    oldest integer not null,                            -- the oldest release, by the schema it knows, that may use it
    epoch bigint not null check (epoch > 0),            -- raised on restore and failover: earlier claims are void
    boot bigint not null check (boot >= 0),             -- counts the processes that opened it
    system text not null,                               -- which cluster it was last written in
    timeline bigint not null,                           -- and on which of its timelines; 0 where that is not told
    copied boolean not null,                            -- true after a restore: whoever opens it raises the epoch
    fingerprint_key bytea not null check (length(fingerprint_key) = 32),
    created_at bigint not null
);

-- The processes that have it open, each by lease. A few rows.
create table {schema}.nodes (
    node integer constraint nodes_key primary key,
    boot bigint not null,
    label text not null,
    machine text not null,                              -- where it runs, so that neighbours see its end at once
    pid bigint not null,
    born bigint not null,                               -- when that machine began the process
    started_at bigint not null,
    expires_at bigint not null,
    reaped_until bigint not null default 0              -- somebody gives back what this dead one held
) with (fillfactor = 50);

-- Append only.
create sequence {schema}.namespace_numbers as integer;
create table {schema}.namespaces (
    namespace integer not null default nextval('{schema}.namespace_numbers') constraint namespaces_key primary key,
    name text collate "C" not null constraint namespaces_name unique
);
insert into {schema}.namespaces (name) values ('default');

-- Receipts of starts. Append only; they outlive their workflow.
create sequence {schema}.workflow_numbers as bigint;
create table {schema}.admissions (
    workflow bigint not null,                           -- the number of the workflow, never used again
    admitted_at bigint not null,
    namespace integer not null,
    id text collate "C" not null,
    fingerprint bytea not null check (length(fingerprint) = 33),
    constraint admissions_key primary key (namespace, id)
) {partitioned:admissions:id};

-- Logs. Append only.
create table {schema}.events (
    workflow bigint not null,
    seq bigint not null,
    at bigint not null,
    namespace integer not null,
    version integer not null,
    type text collate "C" not null,
    payload text not null,
    constraint events_key primary key (workflow, seq)   -- the lock: one event a position
) {partitioned:events:workflow};

-- The current state of each workflow: derived from its log, saved with it, rebuilt from it by verify. There is room on a
-- page for as many new versions as it has rows.
create table {schema}.heads (
    workflow bigint not null,
    revision bigint not null default 1,                 -- the batch that wrote this row: whoever decided on it proves by it
                                                        -- that nobody came between
    seq bigint not null,
    created_at bigint not null,
    updated_at bigint not null,
    visit bigint,
    rank bigint,                                        -- place in the claim order, while ready
    due bigint,
    epoch bigint,                                       -- the open claim, while running
    boot bigint,
    started_at bigint,
    lease_ms bigint,
    lease_until bigint,
    step_deadline bigint,
    namespace integer not null,
    priority integer not null,
    attempt integer,
    delivery integer,
    wake smallint,                                      -- 0 lease, 1 timer, while it waits for time
    remote boolean,
    status text collate "C" not null,
    step text collate "C",
    token bytea,
    worker text,
    id text collate "C" not null,
    name text collate "C" not null,
    code text,                                          -- why it failed
    options text,                                       -- null: the defaults
    progress text,
    wait text,                                          -- JSON: for which signals, while waiting
    constraint heads_key primary key (workflow)
) with (
    fillfactor = 45,
    autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000,
    autovacuum_analyze_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 1
);

-- Lists of a namespace, and of one definition, newest first. Nothing that changes stands in an index of heads: a step, a
-- claim and an end are then new versions on the same page, and no index hears of them.
create index heads_listed on {schema}.heads (namespace, (- workflow));
create index heads_by_name on {schema}.heads (namespace, name, (- workflow));

-- Claims: the next ready step that a worker knows; a row for each ready head.
create table {schema}.ready (
    rank bigint not null,
    workflow bigint not null,
    namespace integer not null,
    name text collate "C" not null,
    step text collate "C" not null,
    constraint ready_key primary key (namespace, name, step, rank, workflow)
) with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0
);

-- Sweeps: whose time has come; and all open claims, for giving them back. A row for each head that waits for time.
create table {schema}.timed (
    due bigint not null,
    workflow bigint not null,
    namespace integer not null,
    wake smallint not null,
    constraint timed_key primary key (namespace, wake, due, workflow)
) with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0
);

-- Lists of what ended badly: few rows, often looked for. A row for each failed or cancelled head.
create table {schema}.ended_badly (
    workflow bigint not null,
    namespace integer not null,
    status text collate "C" not null,
    constraint ended_badly_key primary key (namespace, status, workflow)
);

-- The current value of each variable of each workflow, saved with the commit that wrote it.
create table {schema}.scratchpad (
    workflow bigint not null,
    seq bigint not null,
    namespace integer not null,
    key text collate "C" not null,
    value text not null,
    constraint scratchpad_key primary key (workflow, key)
) with (
    fillfactor = 80,
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 1
);

-- Inboxes: a receipt for each signal, in the order of acceptance, and its payload until a wait has taken it.
create table {schema}.signals (
    workflow bigint not null,
    number bigint not null,                             -- its place in the inbox, from 1
    accepted_at bigint not null,
    seq bigint,                                         -- the event that took it
    namespace integer not null,
    id text collate "C" not null,
    name text collate "C" not null,
    fingerprint bytea not null,
    payload text,                                       -- null once it was taken: the log has it
    constraint signals_key primary key (workflow, number)
) with (
    fillfactor = 80,
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 1
);
create unique index signals_by_id on {schema}.signals (workflow, id);
-- What waits can take, by name; and all of it, in order, by an expression that no look by name can use.
create index signals_pending on {schema}.signals (workflow, name, number) where seq is null;
create index signals_inbox on {schema}.signals (workflow, (- number)) where seq is null;

-- What claim calls with a request id were given, so that a call whose answer was lost can be repeated. Deleted by age.
create table {schema}.claim_calls (
    at bigint not null,
    namespace integer not null,
    request text collate "C" not null,
    granted text not null,                              -- JSON: [[id, seq], ..]
    constraint claim_calls_key primary key (namespace, request)
);
create index claim_calls_by_age on {schema}.claim_calls (at);

-- The last batches of each writer, saved with what they wrote: a writer that was not told what became of its commit sees
-- it here. A void one was put in by such a writer itself, so that a batch which is still on its way cannot commit any
-- more. Deleted by their writer and by age.
create table {schema}.batches (
    boot bigint not null,
    writer bigint not null,                             -- a random number for each connection that writes
    batch bigint not null,
    at bigint not null,
    void boolean not null,
    constraint batches_key primary key (boot, writer, batch)
) with (
    autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0
);

-- For people with a database shell: logs and variables by id.
create view {schema}.workflow_events as
    select n.name as namespace, h.id as workflow_id, e.seq, e.type, e.payload, to_timestamp(e.at / 1000.0) as at
    from {schema}.events e
    join {schema}.heads h on h.workflow = e.workflow
    join {schema}.namespaces n on n.namespace = e.namespace;
create view {schema}.workflow_signals as
    select n.name as namespace, h.id as workflow_id, s.number, s.name, s.id as signal_id, s.payload, s.seq,
        to_timestamp(s.accepted_at / 1000.0) as accepted_at
    from {schema}.signals s
    join {schema}.heads h on h.workflow = s.workflow
    join {schema}.namespaces n on n.namespace = s.namespace;
create view {schema}.workflow_variables as
    select n.name as namespace, h.id as workflow_id, s.key, s.value, s.seq
    from {schema}.scratchpad s
    join {schema}.heads h on h.workflow = s.workflow
    join {schema}.namespaces n on n.namespace = s.namespace;
