//! Looks: short reads on connections of their own.
//!
//! They go to the server that writes, so that whoever was answered finds what he was told of. A look whose connection
//! turns out to be gone is made once more on a new one.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::TryStreamExt;
use steadfast_core::event::Event;
use steadfast_core::fingerprint::Fingerprint;
use steadfast_core::head::Head;
use steadfast_core::json::Json;
use steadfast_core::signal::Pending;
use steadfast_core::snapshot::Admission;
use steadfast_core::state::Status;
use steadfast_core::text::{Key, Namespace, SignalId, SignalName, WorkflowId, WorkflowKey};
use steadfast_core::verify::{Fault, Rebuilt};
use tokio::runtime::{Handle, Runtime};
use tokio::sync::Semaphore;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Row, RowStream};

use super::floors::{Floors, Queue, TimedFloors};
use super::learned::Learned;
use super::place::Place;
use super::rows;
use super::session::{Kind, Purpose, Session, Text, kind, note, postgres};
use super::statements::{head, unnest};
use crate::contract::{Cursor, Filter, Listed, Logged, OldestSnapshot, Page, Reader, StoreError, Variable, Verified};
use crate::stored::signed;

/// How many rows a page of a list looks at before it gives a cursor instead of going on.
const LOOK_MAX: i64 = 10_000;
/// How long a look may take: a little longer than the server gives it, for when that stands still or cannot be heard.
const PATIENCE: Duration = Duration::from_secs(35);
/// What a transaction is set to that looks at everything.
pub(super) const AT_LENGTH: &str = "set local statement_timeout = 0; set local plan_cache_mode = auto;
    set local enable_seqscan = on; set local enable_hashjoin = on; set local enable_mergejoin = on;
    set local enable_sort = on; set local enable_incremental_sort = on; set local jit = off";
/// Heads that are verified together.
const VERIFY_PAGE: i64 = 500;

/// Which statement of a look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
enum L {
    Head,
    Ended,
    Admission,
    Log,
    Variable,
    Pad,
    Inbox,
    List,
    ListOfName,
    ListEndedBadly,
    ListInStatus,
    ListOfNameInStatus,
    NextDue,
    QueuesReady,
    QueuesTimed,
    Bytes,
}

/// The names of [`L`], in their order.
pub(super) const NAMES: [&str; 16] = [
    "look Head",
    "look Ended",
    "look Admission",
    "look Log",
    "look Variable",
    "look Pad",
    "look Inbox",
    "look List",
    "look ListOfName",
    "look ListEndedBadly",
    "look ListInStatus",
    "look ListOfNameInStatus",
    "look NextDue",
    "look QueuesReady",
    "look QueuesTimed",
    "look Bytes",
];

/// The number of a namespace.
macro_rules! namespace {
    () => {
        "(select n.namespace from {schema}.namespaces n where n.name = $1)"
    };
}

/// The receipt that names a workflow's rows.
macro_rules! receipt {
    () => {
        concat!(
            "select a.namespace, a.workflow from {schema}.admissions a where a.namespace = ",
            namespace!(),
            " and a.id = $2"
        )
    };
}

/// A plain page of a list, one row longer than asked for, by the index that the order names.
macro_rules! list {
    ($condition:literal) => {
        concat!(
            "select ",
            head!(),
            " from {schema}.heads h where h.namespace = ",
            namespace!(),
            " and ",
            $condition,
            " order by - h.workflow limit $3"
        )
    };
}

/// A page of those in one status: walks a bounded number of rows, and says how far it came.
macro_rules! list_in_status {
    ($condition:literal) => {
        concat!(
            "with looked as materialized (
                 select x.workflow, x.status, row_number() over (order by x.workflow desc) as place from (
                     select h.workflow, h.status from {schema}.heads h where h.namespace = ",
            namespace!(),
            " and ",
            $condition,
            " order by - h.workflow limit $5 + 1) x
             ), hit as materialized (
                 select l.workflow, l.place from looked l where l.status = $4 order by l.place limit $3
             )
             select w.last, w.edge, k.place, ",
            head!(),
            " from (select max(l.place) as last, max(l.workflow) filter (where l.place = $5) as edge from looked l) w
             left join hit k on true
             left join lateral (select ",
            head!(),
            " from {schema}.heads h where h.workflow = k.workflow limit 1) h on true order by k.place"
        )
    };
}

/// In the order of [`L`].
pub(super) static LOOKS: [Text; 16] = [
    Text {
        text: concat!(
            "select h.* from (",
            receipt!(),
            ") a cross join lateral (select ",
            head!(),
            " from {schema}.heads h where h.workflow = a.workflow limit 1) h"
        ),
        types: &[Type::TEXT, Type::TEXT],
    },
    Text {
        text: "select k.at, e.seq, e.at, e.type, e.version, e.payload from (
                   select i.namespace, i.id, i.at from unnest($1, $2) with ordinality i(namespace, id, at)
               ) k cross join lateral (
                   select a.workflow from {schema}.admissions a where a.id = k.id and a.namespace = (
                       select n.namespace from {schema}.namespaces n where n.name = k.namespace) limit 1
               ) a cross join lateral (
                   select h.seq from {schema}.heads h
                   where h.workflow = a.workflow and h.status in ('completed', 'failed', 'cancelled') limit 1
               ) h cross join lateral (
                   select e.seq, e.at, e.type, e.version, e.payload from {schema}.events e
                   where e.workflow = a.workflow and e.seq = h.seq limit 1) e",
        types: &[Type::TEXT_ARRAY, Type::TEXT_ARRAY],
    },
    Text {
        text: concat!(
            "select a.fingerprint, a.admitted_at from {schema}.admissions a where a.namespace = ",
            namespace!(),
            " and a.id = $2"
        ),
        types: &[Type::TEXT, Type::TEXT],
    },
    Text {
        text: concat!(
            "select e.* from (",
            receipt!(),
            ") a cross join lateral (
                 select e.seq, e.at, e.type, e.version, e.payload from {schema}.events e
                 where e.workflow = a.workflow and e.seq >= $3 order by e.seq limit $4) e"
        ),
        types: &[Type::TEXT, Type::TEXT, Type::INT8, Type::INT8],
    },
    Text {
        text: concat!(
            "select s.* from (",
            receipt!(),
            ") a cross join lateral (
                 select s.value, s.seq from {schema}.scratchpad s where s.workflow = a.workflow and s.key = $3 limit 1) s"
        ),
        types: &[Type::TEXT, Type::TEXT, Type::TEXT],
    },
    Text {
        text: concat!(
            "select s.* from (",
            receipt!(),
            ") a cross join lateral (
                 select s.key, s.value, s.seq from {schema}.scratchpad s
                 where s.workflow = a.workflow and s.key > $3 order by s.key limit $4) s"
        ),
        types: &[Type::TEXT, Type::TEXT, Type::TEXT, Type::INT8],
    },
    Text {
        text: concat!(
            "select s.* from (",
            receipt!(),
            ") a cross join lateral (
                 select s.number, s.name, s.id, s.payload, s.accepted_at from {schema}.signals s
                 where s.workflow = a.workflow and - s.number < - $3 and s.seq is null
                 order by - s.number desc limit $4) s"
        ),
        types: &[Type::TEXT, Type::TEXT, Type::INT8, Type::INT8],
    },
    Text {
        text: list!("- h.workflow > - $2 and $4::text is null"),
        types: &[Type::TEXT, Type::INT8, Type::INT8, Type::TEXT],
    },
    Text {
        text: list!("- h.workflow > - $2 and h.name = $4"),
        types: &[Type::TEXT, Type::INT8, Type::INT8, Type::TEXT],
    },
    Text {
        text: concat!(
            "select h.* from (select e.workflow from {schema}.ended_badly e where e.namespace = ",
            namespace!(),
            " and e.status = $4 and e.workflow < $2 order by e.workflow desc limit $3) e cross join lateral (select ",
            head!(),
            " from {schema}.heads h where h.workflow = e.workflow limit 1) h order by h.workflow desc"
        ),
        types: &[Type::TEXT, Type::INT8, Type::INT8, Type::TEXT],
    },
    Text {
        text: list_in_status!("- h.workflow > - $2 and $6::text is null"),
        types: &[Type::TEXT, Type::INT8, Type::INT8, Type::TEXT, Type::INT8, Type::TEXT],
    },
    Text {
        text: list_in_status!("- h.workflow > - $2 and h.name = $6"),
        types: &[Type::TEXT, Type::INT8, Type::INT8, Type::TEXT, Type::INT8, Type::TEXT],
    },
    Text {
        text: concat!(
            "select min(f.due) from (
                 select s.namespace, w.wake, coalesce((
                     select f.low from ", unnest!("$1" "namespace", "$2" "wake", "$3" "low"), " f
                     where f.namespace = s.namespace and f.wake = w.wake limit 1), -9223372036854775808) as low
                 from {schema}.namespaces s cross join unnest('{0,1}'::smallint[]) w(wake)) p
             cross join lateral (
                 select t.due from {schema}.timed t
                 where t.namespace = p.namespace and t.wake = p.wake and t.due >= p.low order by t.due limit 1) f"
        ),
        types: &[Type::INT4_ARRAY, Type::INT2_ARRAY, Type::INT8_ARRAY],
    },
    Text {
        text: "with recursive walk(namespace, name, step, rank) as (
                   select f.namespace, f.name, f.step, f.rank from (
                       select r.namespace, r.name, r.step, r.rank from {schema}.ready r
                       order by r.namespace, r.name, r.step, r.rank limit 1) f
                   union all
                   select f.namespace, f.name, f.step, f.rank from walk w cross join lateral (
                       select r.namespace, r.name, r.step, r.rank from {schema}.ready r
                       where (r.namespace, r.name, r.step) > (w.namespace, w.name, w.step)
                       order by r.namespace, r.name, r.step, r.rank limit 1) f
               )
               select w.namespace, w.name, w.step, w.rank from walk w",
        types: &[],
    },
    Text {
        text: concat!(
            "select p.namespace, p.wake, f.due from ",
            unnest!("$1" "namespace", "$2" "wake", "$3" "low"),
            " p cross join lateral (
                 select t.due from {schema}.timed t
                 where t.namespace = p.namespace and t.wake = p.wake and t.due < p.low order by t.due limit 1) f"
        ),
        types: &[Type::INT4_ARRAY, Type::INT2_ARRAY, Type::INT8_ARRAY],
    },
    Text {
        text: "select coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint from pg_class c
               where c.relnamespace = '{schema}'::regnamespace and c.relkind in ('r', 'm')",
        types: &[],
    },
];

/// The oldest snapshot of anybody but this connection, and when its transaction began. What anybody may see of others: the
/// numbers of their transactions, not when those began. Never prepared: a database that lacks one of these lists shall lose
/// this look alone.
const OLDEST_SNAPSHOT: &str = "
    select s.age::bigint, (extract(epoch from clock_timestamp() - s.since) * 1000)::bigint
    from (
        select greatest(age(a.backend_xmin), age(a.backend_xid)) as age, a.xact_start as since
        from pg_stat_activity a
        where (a.backend_xmin is not null or a.backend_xid is not null) and a.pid <> pg_backend_pid()
            and a.usesysid is not null and (a.datname = current_database() or a.datname is null)
        union all
        select age(p.transaction), p.prepared from pg_prepared_xacts p where p.database = current_database()
        union all
        select age(r.xmin), null from pg_replication_slots r where r.xmin is not null) s
    order by s.age desc limit 1";

/// A runtime beside the callers', which may block or not.
pub(super) struct Background(Option<Runtime>);

impl Background {
    pub(super) fn start(place: &Place) -> Result<Self, StoreError> {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("steadfast-postgres")
            .enable_all()
            .build()
            .map(|runtime| Self(Some(runtime)))
            .map_err(|source| StoreError::File { doing: "start a runtime for", path: place.to_string().into(), source })
    }

    pub(super) fn handle(&self) -> &Handle {
        self.0.as_ref().expect("it is there until it is dropped").handle()
    }

    /// Runs `work` there and waits for it, wherever the caller stands.
    pub(super) fn wait<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (tell, told) = std::sync::mpsc::sync_channel(1);
        self.handle().spawn(async move {
            // Whoever asked may be gone.
            let _ = tell.send(work.await);
        });
        told.recv().unwrap_or(Err(StoreError::Recovering))
    }
}

impl fmt::Debug for Background {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Background")
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            // Also where waiting is forbidden.
            runtime.shutdown_background();
        }
    }
}

/// Reads a store.
pub struct PostgresReader {
    background: Arc<Background>,
    pool: Arc<Pool>,
    floors: Arc<Floors>,
}

/// The connections of looks.
pub(super) struct Pool {
    place: Place,
    learned: Arc<Learned>,
    room: Semaphore,
    idle: Mutex<Vec<Session>>,
}

impl fmt::Debug for PostgresReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresReader").field("place", &self.pool.place).finish_non_exhaustive()
    }
}

impl Pool {
    async fn take(&self) -> Result<Session, StoreError> {
        loop {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            match idle {
                Some(session) if session.is_over() => {}
                Some(session) => return Ok(session),
                None => return Session::connect(&self.place, &self.learned, &LOOKS, Purpose::Look).await,
            }
        }
    }

    fn give_back(&self, session: Session) {
        if !session.is_over() {
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(session);
        }
    }

    fn forget_all(&self) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Runs a look, once more when its connection was gone.
    async fn look<T>(&self, look: impl for<'s> Fn(&'s Session) -> Look<'s, T>) -> Result<T, StoreError> {
        let _room = self.room.acquire().await.map_err(|_| StoreError::Recovering)?;
        let mut again = true;
        loop {
            let session = self.take().await?;
            let Ok(answer) = tokio::time::timeout(PATIENCE, look(&session)).await else {
                // Nor do the others lead anywhere else.
                self.forget_all();
                return Err(StoreError::NoServer { tried: format!("no answer within {} s", PATIENCE.as_secs()) });
            };
            match &answer {
                Err(StoreError::Postgres { error, .. }) if kind(error) == Kind::Gone => {
                    note(&self.learned, error);
                    // Whatever else lies there has most likely met the same.
                    self.forget_all();
                    if std::mem::take(&mut again) {
                        continue;
                    }
                }
                _ => self.give_back(session),
            }
            return answer;
        }
    }

    /// The oldest snapshot of anybody but the connection that asks.
    pub(super) async fn oldest_snapshot(&self) -> Result<OldestSnapshot, StoreError> {
        self.look(|session| {
            Box::pin(async move {
                let doing = "look for the oldest snapshot";
                let rows = session.client.query_typed(OLDEST_SNAPSHOT, &[]).await.map_err(postgres(doing))?;
                let nobody = OldestSnapshot { transactions: 0, age: Some(Duration::ZERO) };
                Ok(rows.first().map_or(nobody, |row| OldestSnapshot {
                    transactions: row.get::<_, i64>(0).unsigned_abs(),
                    age: row.get::<_, Option<i64>>(1).map(|ms| Duration::from_millis(ms.max(0).unsigned_abs())),
                }))
            })
        })
        .await
    }

    /// All queues of ready rows with the lowest of each, and the lowest of each other one that is below its floor.
    pub(super) async fn queues(&self, timed: TimedFloors) -> Result<Vec<(Queue, i64)>, StoreError> {
        let timed = Arc::new(timed);
        self.look(move |session| {
            let timed = timed.clone();
            Box::pin(async move {
                let doing = "look at all queues";
                let (namespaces, wakes, due) = &*timed;
                let rows = session.run(L::QueuesReady as usize, &[]).await.map_err(postgres(doing))?;
                let ready = rows.iter().map(|row| (Queue::Ready(row.get(0), row.get(1), row.get(2)), row.get(3)));
                let mut queues: Vec<(Queue, i64)> = ready.collect();
                let rows = session.run(L::QueuesTimed as usize, &[namespaces, wakes, due]).await;
                let rows = rows.map_err(postgres(doing))?;
                queues.extend(rows.iter().map(|row| (Queue::Timed(row.get(0), row.get(1)), row.get(2))));
                Ok(queues)
            })
        })
        .await
    }
}

type Look<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

impl PostgresReader {
    pub(super) fn new(place: Place, learned: Arc<Learned>, background: Arc<Background>, floors: Arc<Floors>) -> Self {
        let room = Semaphore::new(place.looks);
        Self { background, pool: Arc::new(Pool { place, learned, room, idle: Mutex::default() }), floors }
    }

    /// The connections that its looks use.
    pub(super) fn pool(&self) -> Arc<Pool> {
        self.pool.clone()
    }

    /// Opens an existing store for reading only, beside its nodes.
    ///
    /// # Errors
    /// [`StoreError`] when there is none.
    pub fn open(url: &str) -> Result<Self, StoreError> {
        let place = Place::parse(url)?;
        let background = Arc::new(Background::start(&place)?);
        let learned = Arc::new(Learned::default());
        background.wait({
            let (place, learned) = (place.clone(), learned.clone());
            async move {
                // Without the statements of looks, which name tables that may not be there.
                let session = Session::connect(&place, &learned, &[], Purpose::Look).await?;
                let has = super::migrate::version(&session, &place).await?;
                if has < super::migrate::known() {
                    let problem = if has == 0 {
                        "there is no store; run serve or migrate with this URL to make one".to_owned()
                    } else {
                        format!("its schema is version {has}; run migrate with this release")
                    };
                    return Err(StoreError::Foreign { path: place.to_string().into(), problem });
                }
                Ok(())
            }
        })?;
        Ok(Self::new(place, learned, background, Arc::default()))
    }

    /// Runs a look, once more when its connection was gone.
    pub(super) fn look<T: Send + 'static>(
        &self,
        look: impl for<'s> Fn(&'s Session) -> Look<'s, T> + Send + Sync + 'static,
    ) -> Result<T, StoreError> {
        let pool = self.pool.clone();
        self.background.wait(async move { pool.look(look).await })
    }

    fn rows<T: Send + 'static>(
        &self,
        which: L,
        doing: &'static str,
        args: Vec<Box<dyn ToSql + Sync + Send>>,
        read: impl Fn(Vec<Row>) -> Result<T, StoreError> + Send + Sync + 'static,
    ) -> Result<T, StoreError> {
        let (args, read) = (Arc::new(args), Arc::new(read));
        self.look(move |session| {
            let (args, read) = (args.clone(), read.clone());
            Box::pin(async move {
                let args: Vec<&(dyn ToSql + Sync)> = args.iter().map(|arg| &**arg as _).collect();
                read(session.run(which as usize, &args).await.map_err(postgres(doing))?)
            })
        })
    }
}

fn names(key: &WorkflowKey) -> Vec<Box<dyn ToSql + Sync + Send>> {
    vec![Box::new(key.namespace.as_str().to_owned()), Box::new(key.id.as_str().to_owned())]
}

fn long(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

impl Reader for PostgresReader {
    fn head(&self, key: &WorkflowKey) -> Result<Option<Head>, StoreError> {
        let namespace = key.namespace.clone();
        self.rows(L::Head, "look at a head", names(key), move |rows| {
            rows.first().map(|row| rows::head(row, 0, &namespace)).transpose()
        })
    }

    fn ended(&self, keys: &[WorkflowKey]) -> Result<Vec<(WorkflowKey, Event)>, StoreError> {
        let keys = keys.to_vec();
        let namespaces: Vec<String> = keys.iter().map(|key| key.namespace.as_str().to_owned()).collect();
        let ids: Vec<String> = keys.iter().map(|key| key.id.as_str().to_owned()).collect();
        self.rows(L::Ended, "look for ends", vec![Box::new(namespaces), Box::new(ids)], move |rows| {
            let ended = |row: &Row| {
                let at = usize::try_from(row.get::<_, i64>(0) - 1).unwrap_or_default();
                Ok((keys[at].clone(), logged(row, 1, &keys[at])?.event))
            };
            rows.iter().map(ended).collect()
        })
    }

    fn admission(&self, key: &WorkflowKey) -> Result<Option<Admission>, StoreError> {
        let of = key.clone();
        self.rows(L::Admission, "look at a receipt", names(key), move |rows| {
            let Some(row) = rows.first() else { return Ok(None) };
            let fingerprint = row.get::<_, &[u8]>(0).try_into().map_err(|_| StoreError::Corrupt {
                what: "receipt",
                key: of.to_string(),
                problem: "its fingerprint is not 33 bytes long".to_owned(),
            })?;
            Ok(Some(Admission { key: of.clone(), fingerprint: Fingerprint(fingerprint), admitted_at: row.get(1) }))
        })
    }

    fn events(&self, key: &WorkflowKey, from: u64, limit: usize) -> Result<Vec<Logged>, StoreError> {
        let of = key.clone();
        let mut args = names(key);
        args.push(Box::new(i64::try_from(from).unwrap_or(i64::MAX)));
        args.push(Box::new(long(limit)));
        self.rows(L::Log, "read a log", args, move |rows| rows.iter().map(|row| logged(row, 0, &of)).collect())
    }

    fn variable(&self, key: &WorkflowKey, name: &Key) -> Result<Option<Variable>, StoreError> {
        let name = name.clone();
        let mut args = names(key);
        args.push(Box::new(name.as_str().to_owned()));
        self.rows(L::Variable, "look at a variable", args, move |rows| {
            Ok(rows.first().map(|row| Variable {
                key: name.clone(),
                value: Json::trusted(row.get::<_, String>(0)),
                seq: row.get::<_, i64>(1).unsigned_abs(),
            }))
        })
    }

    fn variables(&self, key: &WorkflowKey, after: Option<&Key>, limit: usize) -> Result<Vec<Variable>, StoreError> {
        let mut args = names(key);
        args.push(Box::new(after.map_or(String::new(), |after| after.as_str().to_owned())));
        args.push(Box::new(long(limit)));
        self.rows(L::Pad, "read a scratchpad", args, |rows| {
            let variable = |row: &Row| Variable {
                key: Key::trusted(row.get::<_, String>(0)),
                value: Json::trusted(row.get::<_, String>(1)),
                seq: row.get::<_, i64>(2).unsigned_abs(),
            };
            Ok(rows.iter().map(variable).collect())
        })
    }

    fn signals(&self, key: &WorkflowKey, after: u64, limit: usize) -> Result<Vec<Pending>, StoreError> {
        let mut args = names(key);
        args.push(Box::new(signed(after)));
        args.push(Box::new(long(limit)));
        self.rows(L::Inbox, "read an inbox", args, |rows| {
            let pending = |row: &Row| Pending {
                number: row.get::<_, i64>(0).unsigned_abs(),
                name: SignalName::trusted(row.get::<_, String>(1)),
                id: SignalId::trusted(row.get::<_, String>(2)),
                payload: Json::trusted(row.get::<_, String>(3)),
                accepted_at: row.get(4),
            };
            Ok(rows.iter().map(pending).collect())
        })
    }

    fn list(&self, filter: &Filter, before: Option<Cursor>, limit: usize) -> Result<Page, StoreError> {
        let namespace = filter.namespace.clone();
        let before = before.map_or(i64::MAX, |cursor| cursor.0);
        let mut args: Vec<Box<dyn ToSql + Sync + Send>> =
            vec![Box::new(namespace.as_str().to_owned()), Box::new(before)];
        let name = filter.name.as_ref().map(|name| name.as_str().to_owned());
        let status = filter.status.map(|status| status.label());
        let plain = match (&name, filter.status) {
            (Some(_), None) => Some((L::ListOfName, name.clone())),
            (None, None) => Some((L::List, None)),
            (None, Some(Status::Failed | Status::Cancelled)) => Some((L::ListEndedBadly, status.map(str::to_owned))),
            _ => None,
        };
        if let Some((which, argument)) = plain {
            args.push(Box::new(long(limit.saturating_add(1))));
            args.push(Box::new(argument));
            return self.rows(which, "list workflows", args, move |rows| {
                let mut items = rows.iter().map(|row| listed(row, 0, &namespace)).collect::<Result<Vec<_>, _>>()?;
                let more = items.len() > limit;
                items.truncate(limit);
                let next = if more { items.last().map(|item| item.cursor) } else { None };
                Ok(Page { items, next })
            });
        }
        let which = if name.is_some() { L::ListOfNameInStatus } else { L::ListInStatus };
        args.push(Box::new(long(limit)));
        args.push(Box::new(status));
        args.push(Box::new(LOOK_MAX));
        args.push(Box::new(name));
        self.rows(which, "list workflows", args, move |rows| {
            let hits = rows.iter().filter(|row| row.get::<_, Option<i64>>(2).is_some());
            let items = hits.map(|row| listed(row, 3, &namespace)).collect::<Result<Vec<_>, _>>()?;
            let (looked, edge): (Option<i64>, Option<i64>) =
                rows.first().map_or((None, None), |row| (row.get(0), row.get(1)));
            let looked = looked.unwrap_or(0);
            let last_hit = rows.last().and_then(|row| row.get::<_, Option<i64>>(2)).unwrap_or(0);
            let next = if items.len() == limit && last_hit < looked {
                items.last().map(|item| item.cursor)
            } else if items.len() < limit && looked > LOOK_MAX {
                edge.map(Cursor)
            } else {
                None
            };
            Ok(Page { items, next })
        })
    }

    fn next_due(&self) -> Result<Option<i64>, StoreError> {
        let (namespaces, wakes, low) = self.floors.timed();
        let floors: Vec<Box<dyn ToSql + Sync + Send>> = vec![Box::new(namespaces), Box::new(wakes), Box::new(low)];
        self.rows(L::NextDue, "look for the next due time", floors, |rows| Ok(rows.first().and_then(|row| row.get(0))))
    }

    fn verify(&self, progress: &mut dyn FnMut(u64)) -> Result<Verified, StoreError> {
        // Progress is heard here, while the work is done on a thread of its own.
        let (tell, told) = std::sync::mpsc::channel();
        let (pool, handle) = (self.pool.clone(), self.background.handle().clone());
        let work = handle.spawn(async move {
            let session = Session::connect(&pool.place, &pool.learned, &LOOKS, Purpose::Look).await?;
            verify(&session, &pool.place, &tell).await
        });
        // Ends when the other end is gone.
        told.iter().for_each(progress);
        self.background.wait(async move { work.await.unwrap_or(Err(StoreError::Recovering)) })
    }

    fn bytes(&self) -> Result<u64, StoreError> {
        self.rows(L::Bytes, "measure the store", Vec::new(), |rows| {
            Ok(rows.first().map_or(0, |row| row.get::<_, i64>(0).unsigned_abs()))
        })
    }

    fn oldest_snapshot(&self) -> Result<Option<OldestSnapshot>, StoreError> {
        let pool = self.pool.clone();
        self.background.wait(async move { pool.oldest_snapshot().await.map(Some) })
    }
}

fn listed(row: &Row, first: usize, namespace: &Namespace) -> Result<Listed, StoreError> {
    Ok(Listed { cursor: Cursor(row.get(first + 1)), head: rows::head(row, first, namespace)? })
}

/// Reads an event from seq, time, type, version and payload, which begin at `column`.
fn logged(row: &Row, column: usize, key: &WorkflowKey) -> Result<Logged, StoreError> {
    let seq = row.get::<_, i64>(column).unsigned_abs();
    Ok(Logged { seq, at: row.get(column + 1), event: rows::event(row, column + 2, key, seq)? })
}

/// A fault of no workflow in particular.
fn of_the_whole(code: &'static str, detail: String) -> Fault {
    let key = WorkflowKey { namespace: Namespace::default_namespace(), id: WorkflowId::trusted("-") };
    Fault { key, code, detail }
}

/// One snapshot of the whole store: a comparison needs one moment. It is the only long look there is.
async fn verify(
    session: &Session,
    place: &Place,
    progress: &std::sync::mpsc::Sender<u64>,
) -> Result<Verified, StoreError> {
    let doing = "verify the store";
    let begin = format!("begin isolation level repeatable read read only; {AT_LENGTH}");
    session.client.batch_execute(&begin).await.map_err(postgres(doing))?;
    let verified = examine(session, place, progress).await?;
    session.client.batch_execute("commit").await.map_err(postgres(doing))?;
    Ok(verified)
}

/// Re-derives everything, in the transaction that is open.
pub(super) async fn examine(
    session: &Session,
    place: &Place,
    progress: &std::sync::mpsc::Sender<u64>,
) -> Result<Verified, StoreError> {
    let doing = "verify the store";
    let mut verified = Verified::default();
    let mut number = i64::MIN;
    loop {
        let heads = session
            .client
            .query_typed(
                &place.text(concat!(
                    "select ",
                    head!(),
                    ", (select n.name from {schema}.namespaces n where n.namespace = h.namespace)
                     from {schema}.heads h where h.workflow > $1 order by h.workflow limit $2"
                )),
                &[(&number, Type::INT8), (&VERIFY_PAGE, Type::INT8)],
            )
            .await
            .map_err(postgres(doing))?;
        let Some(last) = heads.last() else { break };
        let (_, until) = rows::numbers(last)?;
        let range = [number, until];
        let mut page: Vec<Rebuilding> = heads.iter().map(Rebuilding::new).collect::<Result<_, _>>()?;
        // One after the other: what two statements answer on one connection cannot be read in turns.
        let mut events = Walk::new(
            session,
            place,
            "select e.namespace, e.workflow, e.seq, e.at, e.type, e.version, e.payload from {schema}.events e
             where e.workflow > $1 and e.workflow <= $2 order by e.workflow, e.seq",
            range,
        )
        .await?;
        for one in &mut page {
            while let Some(event) = events.next_of(one.at).await? {
                match logged(&event, 2, &one.key) {
                    Ok(logged) => {
                        verified.events += 1;
                        one.rebuilt.event(logged.seq, logged.at, &logged.event);
                    }
                    Err(error) => one.fault("event_unreadable", error.to_string()),
                }
            }
        }
        events.end().await?;
        let mut variables = Walk::new(
            session,
            place,
            "select s.namespace, s.workflow, s.key, s.value, s.seq from {schema}.scratchpad s
             where s.workflow > $1 and s.workflow <= $2 order by s.workflow, s.key",
            range,
        )
        .await?;
        for one in &mut page {
            while let Some(variable) = variables.next_of(one.at).await? {
                let name = Key::trusted(variable.get::<_, String>(2));
                let value = Json::trusted(variable.get::<_, String>(3));
                one.rebuilt.variable(&name, &value, variable.get::<_, i64>(4).unsigned_abs());
            }
        }
        variables.end().await?;
        let mut signals = Walk::new(
            session,
            place,
            "select s.namespace, s.workflow, s.name, s.id, s.seq from {schema}.signals s
             where s.workflow > $1 and s.workflow <= $2 order by s.workflow, s.number",
            range,
        )
        .await?;
        for one in &mut page {
            while let Some(signal) = signals.next_of(one.at).await? {
                let name = SignalName::trusted(signal.get::<_, String>(2));
                let id = SignalId::trusted(signal.get::<_, String>(3));
                one.rebuilt.signal(&name, &id, signal.get::<_, Option<i64>>(4).map(i64::unsigned_abs));
            }
        }
        signals.end().await?;
        for (mut one, row) in page.into_iter().zip(&heads) {
            match rows::head(row, 0, &one.key.namespace) {
                Ok(head) => one.faults.extend(one.rebuilt.finish(Some(&head))),
                Err(error) => one.fault("head_unreadable", error.to_string()),
            }
            one.faults.into_iter().for_each(|fault| verified.fault(fault));
            verified.workflows += 1;
            // Nobody may listen.
            let _ = progress.send(verified.workflows);
        }
        number = until;
    }
    for (code, text) in [
        (
            "log_without_head",
            "select distinct e.workflow from {schema}.events e where not exists
                 (select from {schema}.heads h where h.workflow = e.workflow and h.namespace = e.namespace)",
        ),
        (
            "variable_without_head",
            "select distinct s.workflow from {schema}.scratchpad s where not exists
                 (select from {schema}.heads h where h.namespace = s.namespace and h.workflow = s.workflow)",
        ),
        (
            "signal_without_head",
            "select distinct s.workflow from {schema}.signals s where not exists
                 (select from {schema}.heads h where h.namespace = s.namespace and h.workflow = s.workflow)",
        ),
        (
            "ready_without_row",
            "select h.workflow from {schema}.heads h where h.rank is not null and not exists
                 (select from {schema}.ready r where r.namespace = h.namespace and r.name = h.name and r.step = h.step
                      and r.rank = h.rank and r.workflow = h.workflow)",
        ),
        (
            "row_without_ready",
            "select r.workflow from {schema}.ready r where not exists
                 (select from {schema}.heads h where h.namespace = r.namespace and h.workflow = r.workflow
                      and h.name = r.name and h.step = r.step and h.rank = r.rank)",
        ),
        (
            "timed_without_row",
            "select h.workflow from {schema}.heads h where h.due is not null and not exists
                 (select from {schema}.timed t where t.namespace = h.namespace and t.wake = h.wake and t.due = h.due
                      and t.workflow = h.workflow)",
        ),
        (
            "row_without_timed",
            "select t.workflow from {schema}.timed t where not exists
                 (select from {schema}.heads h where h.namespace = t.namespace and h.workflow = t.workflow
                      and h.wake = t.wake and h.due = t.due)",
        ),
        (
            "ended_badly_without_row",
            "select h.workflow from {schema}.heads h where h.status in ('failed', 'cancelled') and not exists
                 (select from {schema}.ended_badly e where e.namespace = h.namespace and e.status = h.status
                      and e.workflow = h.workflow)",
        ),
        (
            "row_without_ended_badly",
            "select e.workflow from {schema}.ended_badly e where not exists
                 (select from {schema}.heads h where h.namespace = e.namespace and h.workflow = e.workflow
                      and h.status = e.status)",
        ),
        (
            "head_without_receipt",
            "select h.workflow from {schema}.heads h
                 left join {schema}.admissions a on a.namespace = h.namespace and a.id = h.id
                 where a.workflow is distinct from h.workflow",
        ),
    ] {
        for row in session.client.query_typed(&place.text(text), &[]).await.map_err(postgres(doing))? {
            verified.fault(of_the_whole(code, format!("workflow number {}", row.get::<_, i64>(0))));
        }
    }
    Ok(verified)
}

/// A workflow that is re-derived.
struct Rebuilding {
    at: i64,
    key: WorkflowKey,
    rebuilt: Rebuilt,
    faults: Vec<Fault>,
}

impl Rebuilding {
    /// From a head's row, the name of its namespace behind it.
    fn new(row: &Row) -> Result<Self, StoreError> {
        let (_, at) = rows::numbers(row)?;
        let namespace: Option<String> = row.get(29);
        let key = WorkflowKey {
            namespace: Namespace::trusted(namespace.clone().unwrap_or_default()),
            id: WorkflowId::trusted(row.get::<_, String>(2)),
        };
        let mut rebuilding = Self { at, rebuilt: Rebuilt::new(key.clone()), key, faults: Vec::new() };
        if namespace.is_none() {
            rebuilding.fault("head_without_namespace", format!("workflow number {at}"));
        }
        Ok(rebuilding)
    }

    fn fault(&mut self, code: &'static str, detail: String) {
        self.faults.push(Fault { key: self.key.clone(), code, detail });
    }
}

/// Rows in the order of the workflows that they belong to, as they come in.
struct Walk {
    rows: Pin<Box<RowStream>>,
    next: Option<Row>,
}

impl Walk {
    async fn new(session: &Session, place: &Place, text: &str, [after, until]: [i64; 2]) -> Result<Self, StoreError> {
        let args: [(&(dyn ToSql + Sync), Type); 2] = [(&after, Type::INT8), (&until, Type::INT8)];
        let rows =
            session.client.query_typed_raw(&place.text(text), args).await.map_err(postgres("verify the store"))?;
        let mut walk = Self { rows: Box::pin(rows), next: None };
        walk.step().await?;
        Ok(walk)
    }

    async fn step(&mut self) -> Result<Option<Row>, StoreError> {
        let next = self.rows.try_next().await.map_err(postgres("verify the store"))?;
        Ok(std::mem::replace(&mut self.next, next))
    }

    /// Reads what is left, which belongs to nothing that was asked for.
    async fn end(mut self) -> Result<(), StoreError> {
        while self.next.is_some() {
            self.step().await?;
        }
        Ok(())
    }

    /// The next row of the workflow at `at`; those of workflows before it have no head and are counted elsewhere.
    async fn next_of(&mut self, at: i64) -> Result<Option<Row>, StoreError> {
        loop {
            match &self.next {
                Some(row) => match row.get::<_, i64>(1).cmp(&at) {
                    std::cmp::Ordering::Less => drop(self.step().await?),
                    std::cmp::Ordering::Equal => return self.step().await,
                    std::cmp::Ordering::Greater => return Ok(None),
                },
                None => return Ok(None),
            }
        }
    }
}
