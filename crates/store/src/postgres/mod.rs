//! A store in a PostgreSQL database, shared by any number of nodes.
//!
//! Each process has its committers, each with a connection of its own, and all of them take the same road as with one
//! file: load, decide, save. What keeps them apart is the database: row locks in the order of keys, primary keys as the
//! last line of defence, and the fence of every claim. None of them is a leader.
//!
//! A commit that was answered is durable, as the database promises it. What is done when the answer is lost is in
//! `writer`; which server is used, and what a failover does, in `reach`, `learned` and `board`.

mod board;
mod clock;
mod copy;
mod floors;
mod hints;
mod learned;
pub mod limit;
mod migrate;
mod numbers;
mod place;
mod reach;
mod reader;
mod remembered;
mod rows;
mod session;
mod shell;
mod statements;
mod tls;
mod writer;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use steadfast_core::fingerprint::FingerprintKey;
use steadfast_core::sweep::Boots;
use tokio_postgres::error::SqlState;

pub use self::copy::{Copied, CopyError, Progress, copy};
pub use self::place::{Place, is_postgres};
pub use self::reader::PostgresReader;
pub(crate) use self::session::{may_pass, told};
pub use self::shell::Shell;

use self::board::{Berth, Company};
use self::clock::ServerClock;
use self::floors::Floors;
use self::hints::Hints;
use self::learned::Learned;
use self::numbers::Numbers;
use self::reader::Background;
use self::remembered::Remembered;
use self::session::{Purpose, Session, postgres};
use self::writer::PostgresWriter;
use crate::clock::Clock;
use crate::contract::{Identity, Reader, Store, StoreError, Writer};
use crate::seldom::Seldom;

/// How often a node's lease is renewed.
const RENEWAL: Duration = Duration::from_secs(4);
/// How soon a renewal that failed is tried again.
const RENEWAL_AGAIN: Duration = Duration::from_secs(1);
/// A node that could not renew its own lease for longer than this does not judge others by theirs. While it is kept from
/// renewing, another one may have missed a renewal before, one try that hung, and the pause after it: [`RENEWAL`] twice
/// and [`RENEWAL_AGAIN`]. With this it is still less than a lease.
const GAP_MAX: Duration = Duration::from_secs(6);
/// A node that could not renew its own lease for so long cannot write, whatever it can read. One renewal that hung and
/// the next one that came through do not count.
const UNWRITTEN: Duration = Duration::from_secs(10);
/// How long giving the node number back may take: a database that is busy answers in time, and one that is not there
/// keeps nobody long.
const LEAVING: Duration = Duration::from_secs(5);

/// A store in a PostgreSQL database, and this process's place in it.
#[derive(Debug, Clone)]
pub struct PostgresStore {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    place: Place,
    identity: Identity,
    clock: Arc<dyn Clock>,
    /// The same clock when it is the server's, for readings.
    server_clock: Option<Arc<ServerClock>>,
    learned: Arc<Learned>,
    reader: Arc<PostgresReader>,
    writers: AtomicUsize,
    remembered: Remembered,
    floors: Arc<Floors>,
    numbers: Numbers,
    lease: Arc<Mutex<Lease>>,
    hints: Arc<Hints>,
    /// Goes last: it carries the others' connections.
    background: Arc<Background>,
}

#[derive(Debug)]
struct Lease {
    berth: Berth,
    /// Since when it has been renewed without a gap.
    since: Instant,
    /// When it was renewed last.
    renewed: Instant,
    /// Who else was on board then.
    company: Company,
    left: bool,
}

impl Lease {
    fn new(berth: Berth, company: Company, now: Instant) -> Self {
        Self { berth, since: now, renewed: now, company, left: false }
    }

    fn renewed(&mut self, berth: Berth, company: Company, now: Instant) {
        if now.duration_since(self.renewed) > GAP_MAX {
            self.since = now;
        }
        self.renewed = now;
        self.berth = berth;
        self.company = company;
    }

    /// True when a lease of another node that is over says something of that node. What kept this one from renewing,
    /// an outage or a pause of its own, may have kept the others too; and after it they get the time of a lease.
    fn judges_others(&self, now: Instant) -> bool {
        let lease = Duration::from_millis(board::LEASE_MS.unsigned_abs());
        now.duration_since(self.renewed) <= GAP_MAX && now.duration_since(self.since) >= lease
    }
}

impl PostgresStore {
    /// Opens the store at `url`, making its tables where there are none, and becomes one of its nodes.
    ///
    /// # Errors
    /// [`StoreError`] when no server can be used, when the schema is another program's or another release's.
    pub fn open(url: &str) -> Result<Self, StoreError> {
        Self::open_as(Place::parse(url)?, None, random_key)
    }

    /// Opens it with a given clock and source of the fingerprint secret of a new store.
    ///
    /// # Errors
    /// As [`PostgresStore::open`].
    pub fn open_with(
        url: &str,
        clock: Arc<dyn Clock>,
        secret: impl FnOnce() -> Result<FingerprintKey, std::io::Error>,
    ) -> Result<Self, StoreError> {
        Self::open_as(Place::parse(url)?, Some(clock), secret)
    }

    fn open_as(
        place: Place,
        clock: Option<Arc<dyn Clock>>,
        secret: impl FnOnce() -> Result<FingerprintKey, std::io::Error>,
    ) -> Result<Self, StoreError> {
        let secret = secret().map_err(|source| StoreError::File {
            doing: "draw a secret for",
            path: place.to_string().into(),
            source,
        })?;
        let background = Arc::new(Background::start(&place)?);
        let learned = Arc::new(Learned::default());
        let (identity, berth, company, now) = background.wait({
            let (place, learned) = (place.clone(), learned.clone());
            async move {
                let session = Session::connect(&place, &learned, &[], Purpose::Write).await?;
                let now = server_time(&session).await?;
                migrate::migrate(&session, &place, secret, now).await?;
                let (identity, berth) = board::board(&session, &place).await?;
                let company = board::company(&session, &place, berth).await?;
                Ok((identity, berth, company, now))
            }
        })?;
        let server_clock = clock.is_none().then(|| Arc::new(ServerClock::new(now)));
        let clock = clock.or_else(|| server_clock.clone().map(|clock| clock as Arc<dyn Clock>));
        let lease = Arc::new(Mutex::new(Lease::new(berth, company, Instant::now())));
        background.handle().spawn(keep_lease(place.clone(), learned.clone(), lease.clone(), server_clock.clone()));
        background.handle().spawn(reach::watch(place.clone(), learned.clone()));
        let hints = Arc::new(Hints::default());
        background.handle().spawn(hints::run(place.clone(), learned.clone(), hints.clone(), berth.boot));
        let floors = Arc::new(Floors::default());
        let reader = PostgresReader::new(place.clone(), learned.clone(), background.clone(), floors.clone());
        let reader = Arc::new(reader);
        background.handle().spawn(floors::run(reader.pool(), floors.clone()));
        Ok(Self {
            shared: Arc::new(Shared {
                place,
                identity,
                clock: clock.expect("one of the two is there"),
                server_clock,
                learned,
                reader,
                writers: AtomicUsize::new(0),
                remembered: Remembered::default(),
                floors,
                numbers: Numbers::default(),
                lease,
                hints,
                background,
            }),
        })
    }
}

/// Brings the store at `url` to this release's schema, making it where there is none. Answers the version it had and
/// the one it has.
///
/// # Errors
/// [`StoreError`], as for opening it.
pub fn migrate(url: &str) -> Result<(i32, i32), StoreError> {
    let place = Place::parse(url)?;
    let secret = random_key().map_err(|source| StoreError::File {
        doing: "draw a secret for",
        path: place.to_string().into(),
        source,
    })?;
    let background = Background::start(&place)?;
    background.wait(async move {
        let session = Session::connect(&place, &Arc::default(), &[], Purpose::Write).await?;
        let now = server_time(&session).await?;
        let had = migrate::migrate(&session, &place, secret, now).await?;
        Ok((had, migrate::known()))
    })
}

/// Says that the store at `url` is a restored copy: whoever opens it next raises its epoch. A restore to another
/// cluster and one to a point in time are noticed without it; a dump restored into the same cluster, or a copied disk, is
/// not.
///
/// # Errors
/// [`StoreError`] when there is no such store, [`StoreError::InUse`] while nodes live on it.
pub fn mark_restored(url: &str) -> Result<(), StoreError> {
    let place = Place::parse(url)?;
    let background = Background::start(&place)?;
    background.wait(async move {
        let session = Session::connect(&place, &Arc::default(), &[], Purpose::Write).await?;
        board::mark_restored(&session, &place).await
    })
}

/// Drops the schema of `url` with everything in it: for scratch stores that were made to be measured.
///
/// # Errors
/// [`StoreError`] when the server says no.
pub fn drop_schema(url: &str) -> Result<(), StoreError> {
    let place = Place::parse(url)?;
    let background = Background::start(&place)?;
    background.wait(async move {
        let session = Session::connect(&place, &Arc::default(), &[], Purpose::Write).await?;
        let text = place.text("drop schema if exists {schema} cascade");
        session.client.batch_execute(&text).await.map_err(postgres("drop a scratch schema"))
    })
}

/// The server's version, and the settings that its durability and speed depend on: for reports.
///
/// # Errors
/// [`StoreError`] when it cannot be asked.
pub fn describe(url: &str) -> Result<(String, String), StoreError> {
    let place = Place::parse(url)?;
    let background = Background::start(&place)?;
    background.wait(async move {
        let session = Session::connect(&place, &Arc::default(), &[], Purpose::Write).await?;
        let text = "select current_setting('server_version'),
                        string_agg(name || ' = ' || current_setting(name), ', ' order by name)
                    from unnest('{fsync,full_page_writes,shared_buffers,synchronous_commit}'::text[]) name";
        let rows = session.client.query_typed(text, &[]).await.map_err(postgres("ask for the server's settings"))?;
        Ok(rows.first().map(|row| (row.get(0), row.get(1))).unwrap_or_default())
    })
}

/// Fills the store at `url` with finished workflows of four events each, as if they had been run: for measurements of
/// what a long history costs.
///
/// # Errors
/// [`StoreError`] when the server says no.
pub fn fill_with_finished(url: &str, count: u32) -> Result<(), StoreError> {
    migrate(url)?;
    let place = Place::parse(url)?;
    let background = Background::start(&place)?;
    background.wait(async move {
        let session = Session::connect(&place, &Arc::default(), &[], Purpose::Write).await?;
        let text = place.text(&format!(
            "begin;
             create temporary table fresh on commit drop as
                 select nextval('{{schema}}.workflow_numbers') as workflow, n from generate_series(1, {count}) n;
             insert into {{schema}}.admissions (workflow, admitted_at, namespace, id, fingerprint)
                 select workflow, 1, 1, 'finished-' || n, decode(repeat('ab', 33), 'hex') from fresh;
             insert into {{schema}}.heads (workflow, seq, created_at, updated_at, namespace, priority, status, id, name)
                 select workflow, 3, 1, 1, 1, 0, 'completed', 'finished-' || n, 'ten' from fresh;
             insert into {{schema}}.events (workflow, seq, at, namespace, version, type, payload)
                 select f.workflow, e.seq, 1, 1, 1, e.type, e.payload from fresh f cross join (values
                     (0, 'workflow_created', '{{}}'), (1, 'step_started', '{{}}'), (2, 'step_completed', '{{}}'),
                     (3, 'workflow_completed', '{{}}')) e(seq, type, payload);
             commit"
        ));
        session.client.batch_execute(&text).await.map_err(postgres("fill a scratch store"))?;
        let text = place.text("vacuum analyze {schema}.heads, {schema}.events, {schema}.admissions");
        session.client.batch_execute(&text).await.map_err(postgres("fill a scratch store"))
    })
}

/// How the server carries out every statement of writers and looks, each with its name: for tests of their plans.
///
/// # Errors
/// [`StoreError`] when a statement cannot be explained.
#[doc(hidden)]
pub fn plans(url: &str) -> Result<Vec<(String, String)>, StoreError> {
    let place = Place::parse(url)?;
    let background = Background::start(&place)?;
    background.wait(async move {
        let session = Session::connect(&place, &Arc::default(), &[], Purpose::Write).await?;
        let mut plans = Vec::new();
        let writer = statements::WRITER.iter().zip(statements::NAMES);
        let looks = reader::LOOKS.iter().zip(reader::NAMES);
        for (text, name) in writer.chain(looks) {
            // As a statement that was prepared once: planned for any arguments.
            let types = text.types.iter().map(|kind| kind.name().replace('_', "")).collect::<Vec<_>>();
            let types = text
                .types
                .iter()
                .zip(types)
                .map(|(kind, name)| if kind.name().starts_with('_') { format!("{name}[]") } else { name });
            let types = types.collect::<Vec<_>>().join(", ");
            let parameters = if types.is_empty() { String::new() } else { format!("({types})") };
            let nulls = vec!["null"; text.types.len()].join(", ");
            let arguments = if nulls.is_empty() { String::new() } else { format!("({nulls})") };
            let prepare = format!("prepare explained{parameters} as {}", place.text(text.text));
            let explained = async {
                session.client.batch_execute(&prepare).await?;
                let lines = session.client.simple_query(&format!("explain execute explained{arguments}")).await?;
                session.client.batch_execute("deallocate explained").await?;
                Ok::<_, tokio_postgres::Error>(lines)
            };
            let lines = explained.await.map_err(postgres("explain a statement"))?;
            let lines = lines.iter().filter_map(|line| match line {
                tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
                _ => None,
            });
            plans.push((name.to_owned(), lines.collect::<Vec<_>>().join("\n")));
        }
        Ok(plans)
    })
}

async fn server_time(session: &Session) -> Result<i64, StoreError> {
    let text = "select (extract(epoch from clock_timestamp()) * 1000)::bigint";
    let rows = session.client.query_typed(text, &[]).await.map_err(postgres("read the server's clock"))?;
    Ok(rows.first().map_or(0, |row| row.get(0)))
}

fn random_key() -> Result<FingerprintKey, std::io::Error> {
    let mut key = [0; 32];
    getrandom::fill(&mut key).map_err(std::io::Error::from)?;
    Ok(FingerprintKey(key))
}

fn judges_others(lease: &Mutex<Lease>) -> bool {
    lease.lock().unwrap_or_else(PoisonError::into_inner).judges_others(Instant::now())
}

/// Renews the node's lease until the store is dropped.
async fn keep_lease(place: Place, learned: Arc<Learned>, lease: Arc<Mutex<Lease>>, clock: Option<Arc<ServerClock>>) {
    let mut session: Option<Session> = None;
    let mut pause = RENEWAL;
    let mut seldom = Seldom::new();
    loop {
        tokio::time::sleep(pause).await;
        let berth = {
            let lease = lease.lock().unwrap_or_else(PoisonError::into_inner);
            if lease.left {
                return;
            }
            lease.berth
        };
        let renewed = async {
            let open = match session.take().filter(|session| !session.is_over()) {
                Some(open) => open,
                None => Session::connect(&place, &learned, &[], Purpose::Look).await?,
            };
            let berth = board::renew(&open, &place, berth).await?;
            let company = board::company(&open, &place, berth).await?;
            if let Some(clock) = &clock {
                clock.read(server_time(&open).await?);
            }
            Ok::<_, StoreError>((open, berth, company))
        };
        pause = RENEWAL_AGAIN;
        let failed = match tokio::time::timeout(RENEWAL, renewed).await {
            Ok(Ok((open, berth, company))) => {
                session = Some(open);
                pause = RENEWAL;
                lease.lock().unwrap_or_else(PoisonError::into_inner).renewed(berth, company, Instant::now());
                seldom.over();
                continue;
            }
            Ok(Err(error)) => error,
            Err(_) => StoreError::NoServer { tried: format!("no answer within {} s", RENEWAL.as_secs()) },
        };
        if let Some(left_out) = seldom.says(Instant::now()) {
            tracing::warn!(error = %failed, left_out, "the node's lease could not be renewed");
        }
    }
}

impl Shared {
    fn lease(&self) -> std::sync::MutexGuard<'_, Lease> {
        self.lease.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_clock(&self, at: i64) {
        if let Some(clock) = &self.server_clock {
            clock.read(at);
        }
    }

    fn writer_returned(&self) {
        self.writers.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Store for PostgresStore {
    fn identity(&self) -> Identity {
        self.shared.identity
    }

    fn node(&self) -> u32 {
        self.shared.lease().berth.node.unsigned_abs()
    }

    fn clock(&self) -> Arc<dyn Clock> {
        self.shared.clock.clone()
    }

    fn writer(&self) -> Result<Box<dyn Writer>, StoreError> {
        let most = self.shared.place.committers;
        let taken = |n: usize| (n < most).then_some(n + 1);
        if self.shared.writers.fetch_update(Ordering::SeqCst, Ordering::SeqCst, taken).is_err() {
            return Err(StoreError::WriterTaken);
        }
        match PostgresWriter::new(self.shared.clone()) {
            Ok(writer) => Ok(Box::new(writer)),
            Err(error) => {
                self.shared.writer_returned();
                Err(error)
            }
        }
    }

    fn writers(&self) -> usize {
        self.shared.place.committers
    }

    fn writers_worth(&self) -> usize {
        let place = &self.shared.place;
        if place.committers_told || self.is_alone() { place.committers } else { 1 }
    }

    fn looks(&self) -> usize {
        self.shared.place.looks
    }

    fn reader(&self) -> Arc<dyn Reader> {
        self.shared.reader.clone()
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn is_alone(&self) -> bool {
        self.shared.lease().company.alone
    }

    fn is_first(&self) -> bool {
        self.shared.lease().company.first
    }

    fn is_writable(&self) -> bool {
        self.shared.lease().renewed.elapsed() < UNWRITTEN
    }

    fn boots(&self) -> Result<Boots, StoreError> {
        let (place, own) = (self.shared.place.clone(), self.shared.lease().berth.boot);
        let lease = self.shared.lease.clone();
        self.shared.reader.look(move |session| {
            let (place, lease) = (place.clone(), lease.clone());
            Box::pin(async move { board::boots_seen_by(session, &place, Some(own), || judges_others(&lease)).await })
        })
    }

    fn next_gone(&self) -> Result<Option<u64>, StoreError> {
        let (place, own) = (self.shared.place.clone(), self.shared.lease().berth.boot);
        let lease = self.shared.lease.clone();
        self.shared.reader.look(move |session| {
            let (place, lease) = (place.clone(), lease.clone());
            Box::pin(async move { board::next_gone(session, &place, own, || judges_others(&lease)).await })
        })
    }

    fn hint(&self) {
        self.shared.hints.tell();
    }

    fn on_hint(&self, hear: Box<dyn Fn() + Send + Sync>) {
        self.shared.hints.on(hear);
    }

    fn bury(&self, boot: u64) -> Result<(), StoreError> {
        let place = self.shared.place.clone();
        self.shared.reader.look(move |session| {
            let place = place.clone();
            Box::pin(async move { board::bury(session, &place, boot).await })
        })
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let berth = {
            let mut lease = self.lease();
            lease.left = true;
            lease.berth
        };
        let (place, learned) = (self.place.clone(), self.learned.clone());
        // Best effort: what is not given back runs out.
        let left = self.background.wait(async move {
            let leaving = async {
                let session = Session::connect(&place, &learned, &[], Purpose::Look).await?;
                board::leave(&session, &place, berth).await
            };
            tokio::time::timeout(LEAVING, leaving).await.unwrap_or(Err(StoreError::Recovering))
        });
        match left {
            Ok(()) => {}
            Err(StoreError::Postgres { error, .. }) if error.code() == Some(&SqlState::UNDEFINED_TABLE) => {
                tracing::debug!("the store was dropped while it was open");
            }
            Err(error) => {
                tracing::warn!(%error, "the node's number could not be given back; its lease ends by itself");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// At each instant, in seconds, whether the node may say of another one that its lease is over.
    #[test]
    fn who_could_not_renew_does_not_judge_others() {
        let begin = Instant::now();
        let at = |seconds: u64| begin + Duration::from_secs(seconds);
        let berth = Berth { node: 1, boot: 1 };
        let company = Company { alone: true, first: true };
        let mut lease = Lease::new(berth, company, begin);
        let mut judged = String::new();
        // An outage from 21 to 40 that the node sees the end of at 42.
        let renewals = [4, 8, 12, 16, 20, 42, 46, 50, 54, 58];
        for second in [10, 14, 16, 20, 26, 27, 39, 41, 42, 56, 57, 58] {
            for renewal in renewals {
                if renewal <= second && at(renewal) > lease.renewed {
                    lease.renewed(berth, company, at(renewal));
                }
            }
            judged += &format!("{second}:{} ", if lease.judges_others(at(second)) { "yes" } else { "no" });
        }
        assert_eq!(judged, "10:no 14:no 16:yes 20:yes 26:yes 27:no 39:no 41:no 42:no 56:no 57:yes 58:yes ");
    }
}
