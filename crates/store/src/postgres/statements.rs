//! Statements: everything that commands are loaded and saved by, set by set.
//!
//! One statement loads or saves any number of rows, given as arrays of one length. Rows are locked in the order of
//! their keys (namespace, number); pages of ready and due rows leave out what another node holds.

use tokio_postgres::types::Type;

use super::session::Text;

/// Which statement of a writer's connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub(super) enum W {
    Moment,
    Namespaces,
    Heads,
    HeadsAtOnce,
    Admissions,
    Events,
    Calls,
    Ready,
    Due,
    Open,
    AddNamespace,
    InsertAdmissions,
    InsertEvents,
    InsertHeads,
    UpdateHeads,
    PutVariables,
    DropVariables,
    ForgetCalls,
    InsertCalls,
}

/// The columns of a head, in the order in which they are read.
macro_rules! head {
    () => {
        "h.namespace, h.workflow, h.id, h.name, h.options, h.priority, h.created_at, h.updated_at, h.seq, h.status,
         h.code, h.step, h.visit, h.attempt, h.delivery, h.rank, h.wake, h.due, h.token, h.epoch, h.worker, h.boot,
         h.remote, h.started_at, h.lease_ms, h.lease_until, h.step_deadline, h.progress"
    };
}
pub(super) use head;

/// Heads by number or by id, locked in the order of their keys.
macro_rules! heads {
    ($lock:literal) => {
        concat!(
            "with wanted as materialized (
                 select w.namespace, w.workflow from unnest($1, $2) w(namespace, workflow)
                 union
                 select a.namespace, a.workflow from unnest($3, $4) i(namespace, id)
                 join {schema}.admissions a on a.namespace = i.namespace and a.id = i.id
             )
             select ",
            head!(),
            " from wanted w join {schema}.heads h on h.namespace = w.namespace and h.workflow = w.workflow
             order by h.namespace, h.workflow for no key update of h ",
            $lock
        )
    };
}

const I4: Type = Type::INT4_ARRAY;
const I8: Type = Type::INT8_ARRAY;
const TEXT: Type = Type::TEXT_ARRAY;
const BYTES: Type = Type::BYTEA_ARRAY;

/// In the order of [`W`].
pub(super) static WRITER: [Text; 19] = [
    // The transaction's number, by which its fate can be told later; the server's time; the store's epoch; and numbers
    // for what this batch may admit, which are not used again if it does not.
    Text {
        text: "select pg_current_xact_id()::text, (extract(epoch from clock_timestamp()) * 1000)::bigint,
                      (select s.epoch from {schema}.store s),
                      array(select nextval('{schema}.workflow_numbers') from generate_series(1, $1))",
        types: &[Type::INT4],
    },
    Text { text: "select namespace, name from {schema}.namespaces", types: &[] },
    Text { text: heads!(""), types: &[I4, I8, I4, TEXT] },
    // What is wanted after the first look would break the order of locks if it waited.
    Text { text: heads!("nowait"), types: &[I4, I8, I4, TEXT] },
    Text {
        text: "select a.namespace, a.id, a.workflow, a.fingerprint, a.admitted_at from unnest($1, $2) i(namespace, id)
               join {schema}.admissions a on a.namespace = i.namespace and a.id = i.id",
        types: &[I4, TEXT],
    },
    Text {
        text: "select e.namespace, e.workflow, e.seq, e.type, e.version, e.payload
               from unnest($1, $2, $3) w(namespace, workflow, seq)
               join {schema}.events e on e.namespace = w.namespace and e.workflow = w.workflow and e.seq = w.seq",
        types: &[I4, I8, I8],
    },
    Text {
        text: "select c.namespace, c.request, c.at, c.granted from unnest($1, $2) w(namespace, request)
               join {schema}.claim_calls c on c.namespace = w.namespace and c.request = w.request",
        types: &[I4, TEXT],
    },
    // The places (definition and step) that the worker knows, either by name or, where it knows all but some, by walking
    // from step to step over those that have ready rows; how the first rows of all places together share out among
    // them; and so many rows of each, passing over what another node holds.
    Text {
        text: concat!(
            "with recursive walk(name, step) as (
                 select d.name, f.step from unnest($4) d(name) cross join lateral (
                     select h.step from {schema}.heads h
                     where h.namespace = $1 and h.name = d.name and h.rank is not null order by h.step limit 1) f
                 union all
                 select w.name, f.step from walk w cross join lateral (
                     select h.step from {schema}.heads h
                     where h.namespace = $1 and h.name = w.name and h.step > w.step and h.rank is not null
                     order by h.step limit 1) f
             ), place as materialized (
                 select l.name, l.step from unnest($2, $3) l(name, step)
                 union all
                 select w.name, w.step from walk w
                 where not exists (select from unnest($5, $6) u(name, step) where u.name = w.name and u.step = w.step)
             ), share as materialized (
                 select f.name, f.step, count(*) as n from (
                     select p.name, p.step from place p cross join lateral (
                         select h.rank, h.workflow from {schema}.heads h
                         where h.namespace = $1 and h.name = p.name and h.step = p.step and h.rank is not null
                         order by h.rank, h.workflow limit $7) h
                     order by h.rank, h.workflow limit $7) f
                 group by f.name, f.step
             ), page as materialized (
                 select h.* from share s cross join lateral (
                     select ",
            head!(),
            " from {schema}.heads h
                     where h.namespace = $1 and h.name = s.name and h.step = s.step and h.rank is not null
                     order by h.rank, h.workflow limit s.n for no key update skip locked) h
             )
             select h.* from page h order by h.rank, h.workflow"
        ),
        types: &[Type::INT4, TEXT, TEXT, TEXT, TEXT, TEXT, Type::INT8],
    },
    Text {
        text: concat!(
            "with share as materialized (
                 select f.namespace, f.wake, count(*) as n from (
                     select h.namespace, h.wake from {schema}.namespaces s
                     cross join unnest('{0,1}'::smallint[]) w(wake) cross join lateral (
                         select h.namespace, h.wake, h.due, h.workflow from {schema}.heads h
                         where h.namespace = s.namespace and h.wake = w.wake and h.due <= $1 and h.due is not null
                         order by h.due, h.workflow limit $2) h
                     order by h.due, h.wake, h.namespace, h.workflow limit $2) f
                 group by f.namespace, f.wake
             ), page as materialized (
                 select h.* from share s cross join lateral (
                     select ",
            head!(),
            " from {schema}.heads h
                     where h.namespace = s.namespace and h.wake = s.wake and h.due <= $1 and h.due is not null
                     order by h.due, h.workflow limit s.n for no key update skip locked) h
             )
             select h.* from page h order by h.due, h.wake, h.namespace, h.workflow"
        ),
        types: &[Type::INT8, Type::INT8],
    },
    Text {
        text: concat!(
            "with page as materialized (
                 select h.* from {schema}.namespaces s cross join lateral (
                     select ",
            head!(),
            " from {schema}.heads h
                     where h.namespace = s.namespace and h.wake = 0 and h.due is not null and (h.due, h.workflow) > ($1,
                         case when s.namespace > $2 then -9223372036854775808 when s.namespace = $2 then $3
                              else 9223372036854775807 end)
                     order by h.due, h.workflow limit $4 for no key update skip locked) h
             )
             select h.* from page h order by h.due, h.namespace, h.workflow limit $4"
        ),
        types: &[Type::INT8, Type::INT4, Type::INT8, Type::INT8],
    },
    Text { text: "insert into {schema}.namespaces (name) values ($1) returning namespace", types: &[Type::TEXT] },
    Text {
        text: "insert into {schema}.admissions (namespace, id, workflow, fingerprint, admitted_at)
               select * from unnest($1, $2, $3, $4, $5)",
        types: &[I4, TEXT, I8, BYTES, I8],
    },
    Text {
        text: "insert into {schema}.events (namespace, workflow, seq, type, version, at, payload)
               select * from unnest($1, $2, $3, $4, $5, $6, $7)",
        types: &[I4, I8, I8, TEXT, I4, I8, TEXT],
    },
    Text {
        text: "insert into {schema}.heads (namespace, workflow, seq, updated_at, status, code, step, visit, attempt,
                   delivery, token, epoch, worker, boot, remote, started_at, lease_ms, lease_until, step_deadline,
                   progress, rank, wake, due, id, name, options, priority, created_at)
               select * from unnest($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18,
                   $19, $20, $21, $22, $23, $24, $25, $26, $27, $28)",
        types: &[
            I4,
            I8,
            I8,
            I8,
            TEXT,
            TEXT,
            TEXT,
            I8,
            I4,
            I4,
            BYTES,
            I8,
            TEXT,
            I8,
            Type::BOOL_ARRAY,
            I8,
            I8,
            I8,
            I8,
            TEXT,
            I8,
            Type::INT2_ARRAY,
            I8,
            TEXT,
            TEXT,
            TEXT,
            I4,
            I8,
        ],
    },
    Text {
        text: "update {schema}.heads h set seq = u.seq, updated_at = u.updated_at, status = u.status, code = u.code,
                   step = u.step, visit = u.visit, attempt = u.attempt, delivery = u.delivery, token = u.token,
                   epoch = u.epoch, worker = u.worker, boot = u.boot, remote = u.remote, started_at = u.started_at,
                   lease_ms = u.lease_ms, lease_until = u.lease_until, step_deadline = u.step_deadline,
                   progress = u.progress, rank = u.rank, wake = u.wake, due = u.due
               from unnest($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20,
                   $21, $22, $23)
                   u(namespace, workflow, seq, updated_at, status, code, step, visit, attempt, delivery, token, epoch,
                     worker, boot, remote, started_at, lease_ms, lease_until, step_deadline, progress, rank, wake, due)
               where h.namespace = u.namespace and h.workflow = u.workflow",
        types: &[
            I4,
            I8,
            I8,
            I8,
            TEXT,
            TEXT,
            TEXT,
            I8,
            I4,
            I4,
            BYTES,
            I8,
            TEXT,
            I8,
            Type::BOOL_ARRAY,
            I8,
            I8,
            I8,
            I8,
            TEXT,
            I8,
            Type::INT2_ARRAY,
            I8,
        ],
    },
    Text {
        text: "insert into {schema}.scratchpad as s (namespace, workflow, key, value, seq)
               select * from unnest($1, $2, $3, $4, $5)
               on conflict (namespace, workflow, key) do update set value = excluded.value, seq = excluded.seq",
        types: &[I4, I8, TEXT, TEXT, I8],
    },
    Text {
        text: "delete from {schema}.scratchpad s using unnest($1, $2, $3) u(namespace, workflow, key)
               where s.namespace = u.namespace and s.workflow = u.workflow and s.key = u.key",
        types: &[I4, I8, TEXT],
    },
    // Whoever else forgets them at the same time is not waited for.
    Text {
        text: "delete from {schema}.claim_calls c using (
                   select namespace, request from {schema}.claim_calls where namespace = any($1) and at < $2
                   order by namespace, at limit 1000 for update skip locked) old
               where c.namespace = old.namespace and c.request = old.request",
        types: &[I4, Type::INT8],
    },
    Text {
        text: "insert into {schema}.claim_calls (namespace, request, at, granted) select * from unnest($1, $2, $3, $4)",
        types: &[I4, TEXT, I8, TEXT],
    },
];
