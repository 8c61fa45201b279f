//! Statements: everything that commands are loaded and saved by, set by set.
//!
//! One statement loads or saves any number of rows, given as arrays of one length. Rows are locked in the order of
//! their keys (namespace, number); pages of ready and due rows leave out what another node holds.
//!
//! # Plans
//! A statement is planned once a connection, perhaps while its tables are empty and any plan looks as good as another.
//! So each is written such that there is one plan: a row is looked up for each element of the arrays, one by one, by a
//! sub-select of one table that cannot be taken apart (`limit 1`), and of that table one index alone answers. What must
//! be written over is inserted with a conflict, which looks at the primary key and nowhere else.

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
    Signals,
    Pending,
    Calls,
    Ready,
    Due,
    Open,
    AddNamespace,
    InsertAdmissions,
    InsertEvents,
    InsertHeads,
    UpdateHeads,
    GoOn,
    LeaveReady,
    EnterReady,
    LeaveTimed,
    EnterTimed,
    EndBadly,
    PutVariables,
    DropVariables,
    InsertSignals,
    TakeSignals,
    ForgetCalls,
    InsertCalls,
    SameHeads,
    Seal,
    ForgetBatches,
}

/// The names of [`W`], in their order.
pub(super) const NAMES: [&str; 32] = [
    "Moment",
    "Namespaces",
    "Heads",
    "HeadsAtOnce",
    "Admissions",
    "Events",
    "Signals",
    "Pending",
    "Calls",
    "Ready",
    "Due",
    "Open",
    "AddNamespace",
    "InsertAdmissions",
    "InsertEvents",
    "InsertHeads",
    "UpdateHeads",
    "GoOn",
    "LeaveReady",
    "EnterReady",
    "LeaveTimed",
    "EnterTimed",
    "EndBadly",
    "PutVariables",
    "DropVariables",
    "InsertSignals",
    "TakeSignals",
    "ForgetCalls",
    "InsertCalls",
    "SameHeads",
    "Seal",
    "ForgetBatches",
];

/// The columns of a head, in the order in which they are read.
macro_rules! head {
    () => {
        "h.namespace, h.workflow, h.id, h.name, h.options, h.priority, h.created_at, h.updated_at, h.seq, h.status,
         h.code, h.step, h.visit, h.attempt, h.delivery, h.rank, h.wake, h.due, h.token, h.epoch, h.worker, h.boot,
         h.remote, h.started_at, h.lease_ms, h.lease_until, h.step_deadline, h.progress, h.wait"
    };
}
pub(super) use head;

/// Arrays of one length as rows. Not `from unnest(..)`, which writes all of them down before the first is read: that took
/// a quarter of an update.
macro_rules! unnest {
    ($first:literal $name:literal $(, $array:literal $column:literal)*) => {
        concat!("(select unnest(", $first, ") as ", $name $(, ", unnest(", $array, ") as ", $column)*, ")")
    };
}

pub(super) use unnest;

/// Heads by number or by id, locked in the order of their numbers.
macro_rules! heads {
    ($lock:literal) => {
        concat!(
            "select h.* from (
                 select w.workflow from ",
            unnest!("$1" "workflow"),
            " w
                 union
                 select a.workflow from ",
            unnest!("$2" "namespace", "$3" "id"),
            " i cross join lateral (
                     select a.workflow from {schema}.admissions a where a.namespace = i.namespace and a.id = i.id
                     limit 1) a
                 order by 1
             ) w cross join lateral (
                 select ",
            head!(),
            ", h.revision from {schema}.heads h where h.workflow = w.workflow limit 1 for no key update ",
            $lock,
            ") h"
        )
    };
}

/// Holds inside a transaction that was begun and has its number from `Moment`, and nowhere else: were `begin` refused,
/// what follows it in the same piece would be carried out statement by statement. Asked by all that belongs to a batch;
/// forgetting what is old does no harm by itself.
macro_rules! begun {
    () => {
        "pg_current_xact_id_if_assigned() is not null"
    };
}

/// Fails as a lost race, with a word for whoever reads the server's log, unless `from` has as many rows as the array.
macro_rules! all_of {
    ($array:literal, $from:literal) => {
        concat!(
            "select case when count(*) = cardinality(",
            $array,
            ") then 0 else ('steadfast: another node came first; it is tried again, ' || count(*))::int end from ",
            $from
        )
    };
}

const BOOL: Type = Type::BOOL_ARRAY;
const I2: Type = Type::INT2_ARRAY;
const I4: Type = Type::INT4_ARRAY;
const I8: Type = Type::INT8_ARRAY;
const TEXT: Type = Type::TEXT_ARRAY;
const BYTES: Type = Type::BYTEA_ARRAY;

/// In the order of [`W`].
pub(super) static WRITER: [Text; 32] = [
    // Gives the transaction its number, without which nothing is written; the server's time; the store's epoch;
    // numbers for what this batch or the next ones admit, which are not used again if they do not; and the oldest
    // release that may use the store.
    Text {
        text: "select (extract(epoch from clock_timestamp()) * 1000)::bigint, (select s.epoch from {schema}.store s),
                      array(select nextval('{schema}.workflow_numbers') from generate_series(1, $1)),
                      (select s.oldest from {schema}.store s), pg_current_xact_id() is null",
        types: &[Type::INT4],
    },
    Text { text: "select namespace, name from {schema}.namespaces", types: &[] },
    Text { text: heads!(""), types: &[I8, I4, TEXT] },
    // What is wanted after the first look would break the order of locks if it waited.
    Text { text: heads!("nowait"), types: &[I8, I4, TEXT] },
    Text {
        text: concat!("select i.namespace, i.id, a.workflow, a.fingerprint, a.admitted_at from ", unnest!("$1" "namespace", "$2" "id"), " i
               cross join lateral (
                   select a.workflow, a.fingerprint, a.admitted_at from {schema}.admissions a
                   where a.namespace = i.namespace and a.id = i.id limit 1) a"),
        types: &[I4, TEXT],
    },
    Text {
        text: concat!("select w.workflow, w.seq, e.type, e.version, e.payload from ", unnest!("$1" "workflow", "$2" "seq"), " w
               cross join lateral (
                   select e.type, e.version, e.payload from {schema}.events e
                   where e.workflow = w.workflow and e.seq = w.seq limit 1) e"),
        types: &[I8, I8],
    },
    // Receipts of signals, and the number of the last one of each inbox.
    Text {
        text: concat!("select i.namespace, i.id, i.signal, coalesce(l.number, 0), s.fingerprint, s.accepted_at from ",
               unnest!("$1" "namespace", "$2" "id", "$3" "signal"), " i
               cross join lateral (
                   select a.workflow from {schema}.admissions a where a.namespace = i.namespace and a.id = i.id limit 1) a
               left join lateral (
                   select s.number from {schema}.signals s where s.workflow = a.workflow
                   order by s.number desc limit 1) l on true
               left join lateral (
                   select s.fingerprint, s.accepted_at from {schema}.signals s
                   where s.workflow = a.workflow and s.id = i.signal limit 1) s on true"),
        types: &[I4, TEXT, TEXT],
    },
    Text {
        text: concat!("select i.namespace, i.id, i.name, s.number, s.id, s.payload, s.accepted_at from ",
               unnest!("$1" "namespace", "$2" "id", "$3" "name", "$4" "after"), " i
               cross join lateral (
                   select a.workflow from {schema}.admissions a where a.namespace = i.namespace and a.id = i.id limit 1) a
               cross join lateral (
                   select s.number, s.id, s.payload, s.accepted_at from {schema}.signals s
                   where s.workflow = a.workflow and s.name = i.name and s.number > i.after and s.seq is null
                   order by s.number limit $5) s"),
        types: &[I4, TEXT, TEXT, I8, Type::INT8],
    },
    Text {
        text: concat!("select w.namespace, w.request, c.at, c.granted from ", unnest!("$1" "namespace", "$2" "request"), " w
               cross join lateral (
                   select c.at, c.granted from {schema}.claim_calls c
                   where c.namespace = w.namespace and c.request = w.request limit 1) c"),
        types: &[I4, TEXT],
    },
    // The places (definition and step) that the worker knows, either by name, each with the rank from which on it is read,
    // or, where the worker knows all but some, by walking from step to step over those that have ready rows, in stretches
    // that leave out what is named; how the first rows of all places together share out among them; and so many rows of
    // each, in their order, passing over what another node holds. A row is locked as it is reached, so that no more are
    // locked than are answered.
    Text {
        text: concat!(
            "with recursive walk(name, step, before) as (
                 select d.name, f.step, d.before from ", unnest!("$5" "name", "$6" "after", "$7" "before"), " d
                 cross join lateral (
                     select r.step from {schema}.ready r
                     where r.namespace = $1 and r.name = d.name and r.step > d.after and r.step < d.before
                     order by r.step limit 1) f
                 union all
                 select w.name, f.step, w.before from walk w cross join lateral (
                     select r.step from {schema}.ready r
                     where r.namespace = $1 and r.name = w.name and r.step > w.step and r.step < w.before
                     order by r.step limit 1) f
             ), place as materialized (
                 select l.name, l.step, l.low from ", unnest!("$2" "name", "$3" "step", "$4" "low"), " l
                 union all
                 select w.name, w.step, -9223372036854775808 from walk w
             ), share as materialized (
                 select f.name, f.step, f.low, count(*) as n from (
                     select p.name, p.step, p.low from place p cross join lateral (
                         select r.rank, r.workflow from {schema}.ready r
                         where r.namespace = $1 and r.name = p.name and r.step = p.step and r.rank >= p.low
                         order by r.rank, r.workflow limit $8) r
                     order by r.rank, r.workflow limit $8) f
                 group by f.name, f.step, f.low
             ), page as materialized (
                 select h.* from share s cross join lateral (
                     select h.* from (
                         select r.rank, r.workflow from {schema}.ready r
                         where r.namespace = $1 and r.name = s.name and r.step = s.step and r.rank >= s.low
                         order by r.rank, r.workflow limit s.n + 4096
                     ) r cross join lateral (
                         select ",
            head!(),
            ", h.revision from {schema}.heads h where h.workflow = r.workflow and h.rank = r.rank and h.step = s.step
                         limit 1 for no key update skip locked) h
                     limit s.n) h
             )
             select h.* from page h order by h.rank, h.workflow"
        ),
        types: &[Type::INT4, TEXT, TEXT, I8, TEXT, TEXT, TEXT, Type::INT8],
    },
    // Each kind of due time is read from the instant on that is given for it.
    Text {
        text: concat!(
            "with share as materialized (
                 select f.namespace, f.wake, f.low, count(*) as n from (
                     select t.namespace, t.wake, p.low from (
                         select s.namespace, w.wake, coalesce((
                             select f.low from ", unnest!("$3" "namespace", "$4" "wake", "$5" "low"), " f
                             where f.namespace = s.namespace and f.wake = w.wake limit 1), -9223372036854775808) as low
                         from {schema}.namespaces s cross join unnest('{0,1}'::smallint[]) w(wake)) p
                     cross join lateral (
                         select t.namespace, t.wake, t.due, t.workflow from {schema}.timed t
                         where t.namespace = p.namespace and t.wake = p.wake and t.due >= p.low and t.due <= $1
                         order by t.due, t.workflow limit $2) t
                     order by t.due, t.wake, t.namespace, t.workflow limit $2) f
                 group by f.namespace, f.wake, f.low
             ), page as materialized (
                 select h.* from share s cross join lateral (
                     select h.* from (
                         select t.due, t.workflow from {schema}.timed t
                         where t.namespace = s.namespace and t.wake = s.wake and t.due >= s.low and t.due <= $1
                         order by t.due, t.workflow limit s.n + 4096
                     ) t cross join lateral (
                         select ",
            head!(),
            ", h.revision from {schema}.heads h where h.workflow = t.workflow and h.due = t.due and h.wake = s.wake
                         limit 1 for no key update skip locked) h
                     limit s.n) h
             )
             select h.* from page h order by h.due, h.wake, h.namespace, h.workflow"
        ),
        types: &[Type::INT8, Type::INT8, I4, I2, I8],
    },
    Text {
        text: concat!(
            "with page as materialized (
                 select h.* from {schema}.namespaces s cross join lateral (
                     select h.* from (
                         select t.due, t.workflow from {schema}.timed t
                         where t.namespace = s.namespace and t.wake = 0 and (t.due, t.workflow) > ($1,
                             case when s.namespace > $2 then -9223372036854775808 when s.namespace = $2 then $3
                                  else 9223372036854775807 end)
                         order by t.due, t.workflow limit $4 + 4096
                     ) t cross join lateral (
                         select ",
            head!(),
            ", h.revision from {schema}.heads h where h.workflow = t.workflow and h.due = t.due and h.wake = 0
                         limit 1 for no key update skip locked) h
                     limit $4) h
             )
             select h.* from page h order by h.due, h.namespace, h.workflow limit $4"
        ),
        types: &[Type::INT8, Type::INT4, Type::INT8, Type::INT8],
    },
    Text { text: "insert into {schema}.namespaces (name) values ($1) returning namespace", types: &[Type::TEXT] },
    Text {
        text: concat!(
            "insert into {schema}.admissions (namespace, id, workflow, fingerprint, admitted_at)
             select * from ", unnest!("$1" "namespace", "$2" "id", "$3" "workflow", "$4" "fingerprint", "$5" "admitted_at"), " u where ",
            begun!()
        ),
        types: &[I4, TEXT, I8, BYTES, I8],
    },
    Text {
        text: concat!(
            "insert into {schema}.events (namespace, workflow, seq, type, version, at, payload)
             select * from ", unnest!("$1" "namespace", "$2" "workflow", "$3" "seq", "$4" "type", "$5" "version", "$6" "at", "$7" "payload"), " u where ",
            begun!()
        ),
        types: &[I4, I8, I8, TEXT, I4, I8, TEXT],
    },
    Text {
        text: concat!(
            "insert into {schema}.heads (workflow, seq, updated_at, status, code, step, visit, attempt, delivery, token,
                 epoch, worker, boot, remote, started_at, lease_ms, lease_until, step_deadline, progress, wait, rank, wake,
                 due, namespace, id, name, options, priority, created_at, revision)
             select u.*, $30 from ", unnest!("$1" "workflow", "$2" "seq", "$3" "updated_at", "$4" "status", "$5" "code", "$6" "step", "$7" "visit", "$8" "attempt", "$9" "delivery", "$10" "token", "$11" "epoch", "$12" "worker", "$13" "boot", "$14" "remote", "$15" "started_at", "$16" "lease_ms", "$17" "lease_until", "$18" "step_deadline", "$19" "progress", "$20" "wait", "$21" "rank", "$22" "wake", "$23" "due", "$24" "namespace", "$25" "id", "$26" "name", "$27" "options", "$28" "priority", "$29" "created_at"), " u where ",
            begun!()
        ),
        types: &[
            I8, I8, I8, TEXT, TEXT, TEXT, I8, I4, I4, BYTES, I8, TEXT, I8, BOOL, I8, I8, I8, I8, TEXT, TEXT, I8, I2,
            I8, I4, TEXT, TEXT, TEXT, I4, I8, Type::INT8,
        ],
    },
    // `= any(array[..])` because with `=` heads could also be walked in the order of their key and each of them looked
    // for in the arrays, which a planner prefers while the table is empty.
    Text {
        text: concat!(
            "with changed as (
                 update {schema}.heads h set revision = $25, seq = u.seq, updated_at = u.updated_at,
                     status = u.status, code = u.code, step = u.step, visit = u.visit, attempt = u.attempt,
                     delivery = u.delivery, token = u.token, epoch = u.epoch, worker = u.worker, boot = u.boot,
                     remote = u.remote, started_at = u.started_at, lease_ms = u.lease_ms, lease_until = u.lease_until,
                     step_deadline = u.step_deadline, progress = u.progress, wait = u.wait, rank = u.rank,
                     wake = u.wake, due = u.due
                 from ", unnest!("$1" "workflow", "$2" "revision", "$3" "seq", "$4" "updated_at", "$5" "status", "$6" "code", "$7" "step", "$8" "visit", "$9" "attempt", "$10" "delivery", "$11" "token", "$12" "epoch", "$13" "worker", "$14" "boot", "$15" "remote", "$16" "started_at", "$17" "lease_ms", "$18" "lease_until", "$19" "step_deadline", "$20" "progress", "$21" "wait", "$22" "rank", "$23" "wake", "$24" "due"), " u
                 where h.workflow = any(array[u.workflow]) and h.revision = u.revision and ",
            begun!(),
            " returning 1) ",
            all_of!("$1", "changed")
        ),
        types: &[
            I8, I8, I8, I8, TEXT, TEXT, TEXT, I8, I4, I4, BYTES, I8, TEXT, I8, BOOL, I8, I8, I8, I8, TEXT, TEXT, I8, I2,
            I8, Type::INT8,
        ],
    },
    // The same for those whose worker goes on from step to step: what stays as it is need not be sent.
    Text {
        text: concat!(
            "with changed as (
                 update {schema}.heads h set revision = $13, seq = u.seq, updated_at = u.updated_at,
                     step = u.step, visit = u.visit, attempt = u.attempt, delivery = u.delivery, token = u.token,
                     started_at = u.started_at, lease_until = u.lease_until, step_deadline = u.step_deadline
                 from ",
            unnest!(
                "$1" "workflow", "$2" "revision", "$3" "seq", "$4" "updated_at", "$5" "step", "$6" "visit",
                "$7" "attempt", "$8" "delivery", "$9" "token", "$10" "started_at", "$11" "lease_until",
                "$12" "step_deadline"
            ),
            " u where h.workflow = any(array[u.workflow]) and h.revision = u.revision and ",
            begun!(),
            " returning 1) ",
            all_of!("$1", "changed")
        ),
        types: &[I8, I8, I8, I8, TEXT, I8, I4, I4, BYTES, I8, I8, I8, Type::INT8],
    },
    Text {
        text: concat!(
            "delete from {schema}.ready r where r.ctid = any(array(
                 select o.ctid from ", unnest!("$1" "namespace", "$2" "workflow", "$3" "name", "$4" "step", "$5" "rank"), " u
                 cross join lateral (
                     select o.ctid from {schema}.ready o where o.namespace = u.namespace and o.name = u.name
                         and o.step = u.step and o.rank = u.rank and o.workflow = u.workflow limit 1) o)) and ",
            begun!()
        ),
        types: &[I4, I8, TEXT, TEXT, I8],
    },
    Text {
        text: concat!(
            "insert into {schema}.ready (namespace, workflow, name, step, rank)
             select * from ", unnest!("$1" "namespace", "$2" "workflow", "$3" "name", "$4" "step", "$5" "rank"), " u where ",
            begun!()
        ),
        types: &[I4, I8, TEXT, TEXT, I8],
    },
    Text {
        text: concat!(
            "delete from {schema}.timed t where t.ctid = any(array(
                 select o.ctid from ", unnest!("$1" "namespace", "$2" "workflow", "$3" "wake", "$4" "due"), " u
                 cross join lateral (
                     select o.ctid from {schema}.timed o where o.namespace = u.namespace and o.wake = u.wake
                         and o.due = u.due and o.workflow = u.workflow limit 1) o)) and ",
            begun!()
        ),
        types: &[I4, I8, I2, I8],
    },
    Text {
        text: concat!(
            "insert into {schema}.timed (namespace, workflow, wake, due) select * from ", unnest!("$1" "namespace", "$2" "workflow", "$3" "wake", "$4" "due"), " u where ",
            begun!()
        ),
        types: &[I4, I8, I2, I8],
    },
    Text {
        text: concat!(
            "insert into {schema}.ended_badly (namespace, workflow, status) select * from ", unnest!("$1" "namespace", "$2" "workflow", "$3" "status"), " u where ",
            begun!()
        ),
        types: &[I4, I8, TEXT],
    },
    Text {
        text: concat!(
            "insert into {schema}.scratchpad as s (namespace, workflow, key, value, seq)
             select * from ", unnest!("$1" "namespace", "$2" "workflow", "$3" "key", "$4" "value", "$5" "seq"), " u where ",
            begun!(),
            " on conflict (workflow, key) do update set value = excluded.value, seq = excluded.seq"
        ),
        types: &[I4, I8, TEXT, TEXT, I8],
    },
    Text {
        text: concat!(
            "delete from {schema}.scratchpad s where s.ctid = any(array(
                 select o.ctid from ", unnest!("$1" "workflow", "$2" "key"), " u cross join lateral (
                     select o.ctid from {schema}.scratchpad o where o.workflow = u.workflow and o.key = u.key
                     limit 1) o)) and ",
            begun!()
        ),
        types: &[I8, TEXT],
    },
    Text {
        text: concat!(
            "insert into {schema}.signals (namespace, workflow, number, id, name, accepted_at, fingerprint, seq, payload)
             select * from ", unnest!("$1" "namespace", "$2" "workflow", "$3" "number", "$4" "id", "$5" "name", "$6" "accepted_at", "$7" "fingerprint", "$8" "seq", "$9" "payload"), " u where ",
            begun!()
        ),
        types: &[I4, I8, I8, TEXT, TEXT, I8, BYTES, I8, TEXT],
    },
    // Without `seq is null`, which would lead to an index of all that is pending.
    Text {
        text: concat!(
            "with taken as (
                 update {schema}.signals s set seq = u.seq, payload = null from ",
            unnest!("$1" "workflow", "$2" "number", "$3" "seq"),
            " u where s.workflow = any(array[u.workflow]) and s.number = u.number
                     and coalesce(s.seq, -1) = -1 and ",
            begun!(),
            " returning 1) ",
            all_of!("$1", "taken")
        ),
        types: &[I8, I8, I8],
    },
    // Whoever else forgets them at the same time is not waited for.
    Text {
        text: "delete from {schema}.claim_calls c where c.ctid = any(array(
                   select o.ctid from {schema}.claim_calls o where o.at < $1 order by o.at limit 1000
                   for update skip locked))",
        types: &[Type::INT8],
    },
    Text {
        text: concat!(
            "insert into {schema}.claim_calls (namespace, request, at, granted)
             select * from ", unnest!("$1" "namespace", "$2" "request", "$3" "at", "$4" "granted"), " u where ",
            begun!()
        ),
        types: &[I4, TEXT, I8, TEXT],
    },
    // Heads that a decision rests on and does not change.
    Text {
        text: concat!(
            all_of!("$1", ""),
            unnest!("$1" "workflow", "$2" "revision"),
            " u cross join lateral (select from {schema}.heads h where h.workflow = u.workflow and h.revision = u.revision limit 1) h"
        ),
        types: &[I8, I8],
    },
    // The batch itself, which commits under the epoch that it was decided in and as long as this release may, or not
    // at all.
    Text {
        text: concat!(
            "with sealed as (
                 insert into {schema}.batches (boot, writer, batch, at, void)
                 select $1, $2, $3, $4, false from {schema}.store s where s.epoch = $5 and s.oldest <= $6 and ",
            begun!(),
            " returning 1)
             select case when count(*) = 1 then 0
                 else ('steadfast: the store has another epoch or release; it is tried again, ' || count(*))::int end from sealed"
        ),
        types: &[Type::INT8, Type::INT8, Type::INT8, Type::INT8, Type::INT8, Type::INT4],
    },
    Text {
        text: "delete from {schema}.batches b where b.boot = $1 and b.writer = $2 and b.batch >= $3 and b.batch < $4",
        types: &[Type::INT8, Type::INT8, Type::INT8, Type::INT8],
    },
];

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio_postgres::types::ToSql;

    use super::*;
    use crate::postgres::place::Place;
    use crate::postgres::session::{Purpose, Session};

    #[test]
    fn every_statement_of_a_save_asks_whether_there_is_a_transaction() {
        let asks = |which: W| WRITER[which as usize].text.contains(begun!());
        let writes = |which: W| {
            let text = WRITER[which as usize].text;
            ["insert into", "update {", "delete from"].iter().any(|word| text.contains(word))
        };
        let save = [
            W::InsertAdmissions,
            W::InsertEvents,
            W::InsertHeads,
            W::UpdateHeads,
            W::GoOn,
            W::LeaveReady,
            W::EnterReady,
            W::LeaveTimed,
            W::EnterTimed,
            W::EndBadly,
            W::PutVariables,
            W::DropVariables,
            W::InsertSignals,
            W::TakeSignals,
            W::InsertCalls,
            W::Seal,
        ];
        assert!(save.into_iter().all(|which| writes(which) && asks(which)));
        let writing =
            WRITER.iter().filter(|text| ["insert", "update {", "delete"].iter().any(|word| text.text.contains(word)));
        // Those of `save`, and what is forgotten or stands alone: ForgetCalls, ForgetBatches, AddNamespace.
        assert_eq!(writing.count(), save.len() + 3);
    }

    /// A save is one piece, and its statements come behind a `begin`. Were that cancelled at the server's shell, each of
    /// them would be a transaction of its own.
    #[tokio::test]
    async fn what_follows_a_begin_that_was_refused_writes_nothing() {
        let url = steadfast_pgtest::shared().fresh_url();
        tokio::task::spawn_blocking({
            let url = url.clone();
            move || crate::postgres::migrate(&url)
        })
        .await
        .expect("it does not panic")
        .expect("the store is made");
        let place = Place::parse(&url).expect("it is well formed");
        let session =
            Session::connect(&place, &Arc::default(), &WRITER, Purpose::Write).await.expect("it can be connected to");
        let (one, many, word, bytes) = (vec![1_i32], vec![1_i64], vec!["a"], vec![&[7_u8; 33][..]]);
        let receipt: [&(dyn ToSql + Sync); 5] = [&one, &word, &many, &bytes, &many];
        let event: [&(dyn ToSql + Sync); 7] = [&one, &many, &many, &word, &one, &many, &word];
        let variable: [&(dyn ToSql + Sync); 5] = [&one, &many, &word, &word, &many];
        let timed: [&(dyn ToSql + Sync); 4] = [&one, &many, &vec![0_i16], &many];
        let ready: [&(dyn ToSql + Sync); 5] = [&one, &many, &word, &word, &many];
        let badly: [&(dyn ToSql + Sync); 3] = [&one, &many, &word];
        let call: [&(dyn ToSql + Sync); 4] = [&one, &word, &many, &word];
        let written: [(W, &[&(dyn ToSql + Sync)], &str); 7] = [
            (W::InsertAdmissions, &receipt, "admissions"),
            (W::InsertEvents, &event, "events"),
            (W::PutVariables, &variable, "scratchpad"),
            (W::EnterTimed, &timed, "timed"),
            (W::EnterReady, &ready, "ready"),
            (W::EndBadly, &badly, "ended_badly"),
            (W::InsertCalls, &call, "claim_calls"),
        ];
        let count = async |table: &str| {
            let text = place.text(&format!("select count(*) from {{schema}}.{table}"));
            session.client.query_typed(&text, &[]).await.expect("it can be counted")[0].get::<_, i64>(0)
        };
        for (which, args, table) in written {
            session.run(which as usize, args).await.expect("it is carried out");
            assert_eq!(count(table).await, 0, "{which:?}");
            session.begin().await.expect("it begins");
            session.run(W::Moment as usize, &[&0_i32]).await.expect("it is carried out");
            session.run(which as usize, args).await.expect("it is carried out");
            session.client.batch_execute("commit").await.expect("it commits");
            assert_eq!(count(table).await, 1, "{which:?} in a transaction");
        }
        let number: i64 = 1;
        let seal: [&(dyn ToSql + Sync); 6] = [&number, &number, &number, &number, &number, &1_i32];
        assert!(session.run(W::Seal as usize, &seal).await.is_err(), "nothing says that the batch has committed");
        assert_eq!(count("batches").await, 0);
        let leave: [(W, &[&(dyn ToSql + Sync)], &str); 3] = [
            (W::LeaveTimed, &timed, "timed"),
            (W::LeaveReady, &ready, "ready"),
            (W::DropVariables, &[&many, &word], "scratchpad"),
        ];
        for (which, args, table) in leave {
            session.run(which as usize, args).await.expect("it is carried out");
            assert_eq!(count(table).await, 1, "{which:?}");
        }
    }
}
