//! Reach: which server a connection goes to.
//!
//! # Which server
//! Every address of every host of the URL is asked at once, and the first in its order that takes writes is used. A
//! standby, a server that is starting up or one that was set read-only is passed over, so that a failover needs no word
//! from anybody. Whoever is slow to answer is not waited for when another has answered; see [`GRACE`].
//!
//! # Two that take writes
//! When a standby was promoted while the primary before it lives on, both do. Timelines tell which is which: all that
//! answered are noted before one is chosen, and one that was overtaken is none to choose ([`Learned`]). Connections that
//! stand already find out by [`watch`].
//!
//! # Names with several addresses
//! Each address is a host of its own. Only those of this very machine, as `localhost` has them, are taken for one server
//! and tried one after the other: it would be asked twice each time.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_postgres::config::SslMode;
use tokio_postgres::tls::TlsStream;
use tokio_postgres::{AsyncMessage, Client, Connection, Error, NoTls};

use super::learned::Learned;
use super::place::{Host, Keepalive, Place};
use super::session::{Backend, Purpose, Server, may_pass, told};
use super::tls::may_go_otherwise;

/// How long the other hosts may take when one that takes writes has answered. A host that is away costs each connection
/// this; one that answers later than this is found by [`watch`].
const GRACE: Duration = Duration::from_millis(500);
/// How often the other hosts are looked at.
const WATCH: Duration = Duration::from_secs(5);

/// A server that takes writes, and a connection to it on which nothing is set yet.
pub(super) struct Reached {
    /// As the URL names it.
    pub name: String,
    pub client: Client,
    pub server: Server,
    /// The server's process, where it says when that began.
    pub backend: Option<Backend>,
    /// What comes without being asked for, where the connection is made for that.
    pub told: Option<UnboundedReceiver<AsyncMessage>>,
    pub version: i32,
    pub path: Path,
    /// An answered commit may be lost, unless the connection asks for more.
    pub is_hasty: bool,
}

/// Why a host cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Problem {
    pub said: String,
    /// It may be otherwise in a moment.
    pub may_pass: bool,
}

impl Problem {
    pub(super) fn passing(said: String) -> Self {
        Self { said, may_pass: true }
    }

    fn for_good(said: &str) -> Self {
        Self { said: said.to_owned(), may_pass: false }
    }

    /// The same, with the host's name.
    pub(super) fn at(self, name: &str) -> Self {
        Self { said: format!("{name}: {}", self.said), ..self }
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        Self { said: told(&error), may_pass: may_pass(&error) }
    }
}

impl From<std::io::Error> for Problem {
    fn from(error: std::io::Error) -> Self {
        Self::passing(error.to_string())
    }
}

/// What is between us and the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Path {
    /// Nothing: the server sees this very connection.
    Direct,
    /// A pooler: the server sees another connection.
    Pooler,
    /// Nobody can tell.
    Unknown,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Address {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

/// What leads to one server, to be tried one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Way {
    name: String,
    /// What a certificate has to be for.
    host: String,
    addresses: Vec<Address>,
}

/// The servers that take writes, in the order of the URL, and what was said elsewhere.
pub(super) async fn servers(place: &Place, learned: &Learned, purpose: Purpose) -> (Vec<Reached>, Vec<Problem>) {
    let (ways, mut tried) = ways(place).await;
    let (reached, more) = ask(place, learned, &ways, purpose, GRACE).await;
    tried.extend(more);
    (reached, tried)
}

/// Looks at the hosts from time to time, so that connections to a server that was overtaken learn of it. Ends at once
/// where there is nothing but one address.
pub(super) async fn watch(place: Place, learned: Arc<Learned>) {
    let is_fixed =
        |host: &Host| host.address.is_some() || host.name.starts_with('/') || host.name.parse::<IpAddr>().is_ok();
    if matches!(&place.hosts()[..], [host] if is_fixed(host)) {
        return;
    }
    loop {
        tokio::time::sleep(WATCH).await;
        let (ways, _) = ways(&place).await;
        if ways.len() > 1 {
            drop(ask(&place, &learned, &ways, Purpose::Look, place.connect_timeout()).await);
        }
    }
}

/// Looks the names up.
async fn ways(place: &Place) -> (Vec<Way>, Vec<Problem>) {
    let found = place.hosts().into_iter().map(|host| async move {
        let ways = timeout(place.connect_timeout(), ways_to(&host)).await;
        match ways {
            Ok(Ok(ways)) => Ok(ways),
            Ok(Err(error)) => Err(Problem::from(error).at(&host.to_string())),
            Err(_) => {
                let said = format!("{host}: its name was not found within {} s", place.connect_timeout().as_secs_f64());
                Err(Problem::passing(said))
            }
        }
    });
    let (mut ways, mut tried) = (Vec::new(), Vec::new());
    for found in futures_util::future::join_all(found).await {
        match found {
            Ok(found) => ways.extend(found),
            Err(problem) => tried.push(problem),
        }
    }
    (ways, tried)
}

async fn ways_to(host: &Host) -> std::io::Result<Vec<Way>> {
    let way = |name: String, addresses| Way { name, host: host.name.clone(), addresses };
    if let Some(address) = host.address {
        return Ok(vec![way(host.to_string(), vec![Address::Tcp(SocketAddr::new(address, host.port))])]);
    }
    if host.name.starts_with('/') {
        let path = format!("{}/.s.PGSQL.{}", host.name, host.port);
        return Ok(vec![way(host.to_string(), vec![Address::Unix(path.into())])]);
    }
    let addresses: Vec<SocketAddr> = tokio::net::lookup_host((host.name.as_str(), host.port)).await?.collect();
    Ok(parted(host, &addresses))
}

/// The ways to a host with these addresses.
fn parted(host: &Host, addresses: &[SocketAddr]) -> Vec<Way> {
    if addresses.len() < 2 || addresses.iter().all(|address| address.ip().is_loopback()) {
        let addresses = addresses.iter().copied().map(Address::Tcp).collect();
        return vec![Way { name: host.to_string(), host: host.name.clone(), addresses }];
    }
    let way = |address: &SocketAddr| Way {
        name: format!("{host} ({})", address.ip()),
        host: host.name.clone(),
        addresses: vec![Address::Tcp(*address)],
    };
    addresses.iter().map(way).collect()
}

/// Goes all ways at once, and notes each server that takes writes as soon as it has answered.
async fn ask(
    place: &Place,
    learned: &Learned,
    ways: &[Way],
    purpose: Purpose,
    grace: Duration,
) -> (Vec<Reached>, Vec<Problem>) {
    let mut asked: FuturesUnordered<_> =
        ways.iter().enumerate().map(|(n, way)| async move { (n, go(place, way, purpose).await) }).collect();
    let mut answers: Vec<Option<Result<Reached, Problem>>> = ways.iter().map(|_| None).collect();
    let mut end = None;
    loop {
        let next = match end {
            None => asked.next().await,
            Some(end) => timeout_at(end, asked.next()).await.unwrap_or(None),
        };
        let Some((n, answer)) = next else { break };
        if let Ok(reached) = &answer {
            learned.met(&reached.server);
            end = end.or(Some(Instant::now() + grace));
        }
        answers[n] = Some(answer);
    }
    let (mut reached, mut tried) = (Vec::new(), Vec::new());
    for answer in answers.into_iter().flatten() {
        match answer {
            Ok(server) => reached.push(server),
            Err(problem) => tried.push(problem),
        }
    }
    (reached, tried)
}

/// Connects to the first of the addresses that takes writes.
async fn go(place: &Place, way: &Way, purpose: Purpose) -> Result<Reached, Problem> {
    let mut tried = Vec::new();
    let patience = place.connect_timeout();
    for address in &way.addresses {
        match timeout(patience, connect(place, way, address, purpose)).await {
            Ok(Ok(reached)) => return Ok(reached),
            Ok(Err(problem)) => tried.push(problem),
            Err(_) => tried.push(Problem::passing(format!("no answer within {} s", patience.as_secs_f64()))),
        }
    }
    let may_pass = tried.iter().any(|problem| problem.may_pass);
    let said = tried.into_iter().map(|problem| problem.said).collect::<Vec<_>>().join(", ");
    Err(Problem { said, may_pass }.at(&way.name))
}

/// Our end of a connection, for comparing it with what the server sees.
enum End {
    Tcp {
        port: u16,
    },
    Unix {
        /// The process that listens at the other end, where the system tells.
        listener: Option<i32>,
    },
}

async fn connect(place: &Place, way: &Way, address: &Address, purpose: Purpose) -> Result<Reached, Problem> {
    let (tell, told_of) = unbounded_channel();
    let tell = (purpose == Purpose::Listen).then_some(tell);
    let (client, end) = match address {
        Address::Unix(path) => {
            let stream = UnixStream::connect(path).await?;
            let listener = stream.peer_cred().ok().and_then(|peer| peer.pid());
            let (client, connection) = place.config.connect_raw(stream, NoTls).await?;
            tokio::spawn(drive(connection, tell));
            (client, End::Unix { listener })
        }
        Address::Tcp(address) => dial(place, way, *address, tell).await?,
    };
    let answer = client
        .query_typed(
            "select pg_is_in_recovery() or current_setting('transaction_read_only')::boolean,
                    current_setting('server_version_num')::int, inet_client_port(),
                    current_setting('synchronous_commit') = 'off', pg_backend_pid(),
                    (select a.backend_start::text from pg_stat_activity a where a.pid = pg_backend_pid())",
            &[],
        )
        .await?;
    let first = answer.first().ok_or_else(|| Problem::for_good("it says nothing of itself"))?;
    if first.get::<_, bool>(0) {
        return Err(Problem::passing("it takes no writes now (a standby, or set read-only)".to_owned()));
    }
    let version: i32 = first.get(1);
    if version < 130_000 {
        return Err(Problem::for_good(&format!("its version is {}; 13 or later is needed", version / 10_000)));
    }
    let server = server(&client).await?;
    Ok(Reached {
        name: way.name.clone(),
        client,
        server,
        backend: first.get::<_, Option<String>>(5).map(|since| Backend { pid: first.get(4), since }),
        told: (purpose == Purpose::Listen).then_some(told_of),
        version,
        path: path(&end, first.get(2), first.get(4)),
        is_hasty: first.get(3),
    })
}

/// Connects with TLS or without, as often as the mode tries; what each try met, where all fail.
async fn dial(
    place: &Place,
    way: &Way,
    address: SocketAddr,
    tell: Option<UnboundedSender<AsyncMessage>>,
) -> Result<(Client, End), Problem> {
    let mut met: Vec<Problem> = Vec::new();
    for mode in place.tls.tries() {
        let stream = match TcpStream::connect(address).await {
            Ok(stream) => stream,
            Err(error) => {
                met.push(error.into());
                break;
            }
        };
        let end = End::Tcp { port: stream.local_addr()?.port() };
        tend(&stream, &place.keepalive)?;
        let failed = if *mode == SslMode::Disable {
            match place.config.connect_raw(stream, NoTls).await {
                Ok((client, connection)) => {
                    tokio::spawn(drive(connection, tell));
                    return Ok((client, end));
                }
                Err(error) => error,
            }
        } else {
            let connector = place.tls.connector(&way.host, address.ip()).map_err(|said| Problem::for_good(&said))?;
            match place.config.clone().ssl_mode(*mode).connect_raw(stream, connector).await {
                Ok((client, connection)) => {
                    tokio::spawn(drive(connection, tell));
                    return Ok((client, end));
                }
                Err(error) => error,
            }
        };
        let goes_on = may_go_otherwise(&failed);
        let problem = match place.tls.told(&failed, *mode) {
            Some(said) => Problem::for_good(&said),
            None => Problem::from(failed),
        };
        if !met.contains(&problem) {
            met.push(problem);
        }
        if !goes_on {
            break;
        }
    }
    let may_pass = met.iter().any(|problem| problem.may_pass);
    let said = met.into_iter().map(|problem| problem.said).collect::<Vec<_>>().join(", ");
    Err(Problem { said, may_pass })
}

/// What is between our end and the server, which sees a client at `port`, if at any, and answers as `process`.
fn path(end: &End, port: Option<i32>, process: i32) -> Path {
    match (end, port) {
        (End::Tcp { port: own }, Some(port)) if i32::from(*own) == port => Path::Direct,
        // Something that changes ports on the way looks the same; it costs a little speed.
        (End::Tcp { .. }, _) | (End::Unix { .. }, Some(_)) => Path::Pooler,
        // On one machine the process that listens for PostgreSQL is the parent of each that answers.
        (End::Unix { listener: Some(listener) }, None) if parent(process) == Some(*listener) => Path::Direct,
        (End::Unix { .. }, None) => Path::Unknown,
    }
}

fn parent(process: i32) -> Option<i32> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // Behind the name, which may hold anything.
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

/// Carries a connection until it ends.
async fn drive<S, T>(mut connection: Connection<S, T>, tell: Option<UnboundedSender<AsyncMessage>>)
where
    S: AsyncRead + AsyncWrite + Unpin,
    T: TlsStream + Unpin,
{
    loop {
        match std::future::poll_fn(|context| connection.poll_message(context)).await {
            Some(Ok(AsyncMessage::Notice(notice))) => {
                tracing::debug!(notice = notice.message(), "the server says");
            }
            Some(Ok(message)) => {
                if let Some(tell) = &tell {
                    // Whoever listened may be gone.
                    let _ = tell.send(message);
                }
            }
            // Whoever waits for an answer hears of it there.
            Some(Err(_)) | None => return,
        }
    }
}

/// A peer that is silently gone is noticed.
fn tend(stream: &TcpStream, keepalive: &Keepalive) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    if keepalive.asks {
        let mut asks = TcpKeepalive::new();
        asks = keepalive.idle.map_or(asks.clone(), |idle| asks.with_time(idle));
        asks = keepalive.interval.map_or(asks.clone(), |interval| asks.with_interval(interval));
        asks = keepalive.count.map_or(asks.clone(), |count| asks.with_retries(count));
        socket.set_tcp_keepalive(&asks)?;
    }
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(keepalive.unanswered)?;
    Ok(())
}

async fn server(client: &Client) -> Result<Server, Error> {
    let system = match client.query_typed("select system_identifier::text from pg_control_system()", &[]).await {
        Ok(rows) => rows.first().map(|row| row.get::<_, String>(0)).unwrap_or_default(),
        Err(error) if error.as_db_error().is_some() => String::new(),
        Err(error) => return Err(error),
    };
    let walk = "select ('x' || lpad(substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8), 16, '0'))::bit(64)::bigint";
    let timeline = match client.query_typed(walk, &[]).await {
        Ok(rows) => rows.first().map(|row| row.get::<_, i64>(0)).unwrap_or_default(),
        // Databases that only speak PostgreSQL's language may have no log of its kind.
        Err(error) if error.as_db_error().is_some() => 0,
        Err(error) => return Err(error),
    };
    Ok(Server { system, timeline })
}

#[cfg(test)]
mod tests {
    use steadfast_pgtest::{Bouncer, Cluster};

    use super::*;

    #[test]
    fn each_address_of_a_name_is_a_host_unless_all_are_this_machine() {
        let host = Host { name: "db".to_owned(), address: None, port: 5432 };
        let ways = |addresses: &[&str]| {
            let addresses: Vec<SocketAddr> = addresses.iter().map(|address| address.parse().unwrap()).collect();
            let ways = parted(&host, &addresses);
            ways.iter().map(|way| format!("{} by {}", way.name, way.addresses.len())).collect::<Vec<_>>().join(", ")
        };
        assert_eq!(ways(&["10.0.0.1:5432"]), "db:5432 by 1");
        assert_eq!(ways(&["[::1]:5432", "127.0.0.1:5432"]), "db:5432 by 2");
        assert_eq!(ways(&["10.0.0.1:5432", "10.0.0.2:5432"]), "db:5432 (10.0.0.1) by 1, db:5432 (10.0.0.2) by 1");
    }

    /// Only the first address of a name that took a connection was asked.
    #[tokio::test]
    async fn the_server_that_takes_writes_is_found_wherever_it_stands() {
        let primary = Cluster::start(&[]);
        let standby = primary.standby(false);
        let place = Place::parse(&primary.url("connect_timeout=5")).expect("it is well formed");
        let tcp = |cluster: &Cluster| Address::Tcp(SocketAddr::from(([127, 0, 0, 1], cluster.port())));
        let way = |name: &str, addresses: Vec<Address>| Way { name: name.to_owned(), host: name.to_owned(), addresses };
        let asked = async |ways: &[Way]| {
            let (reached, tried) = ask(&place, &Learned::default(), ways, Purpose::Look, GRACE).await;
            let tried = tried.into_iter().map(|problem| problem.said).collect::<Vec<_>>();
            (reached.into_iter().map(|reached| reached.name).collect::<Vec<_>>(), tried)
        };
        let is_standby = "it takes no writes now (a standby, or set read-only)";
        assert_eq!(asked(&[way("one", vec![tcp(&standby), tcp(&primary)])]).await, (vec!["one".to_owned()], vec![]));
        let two = [way("standby", vec![tcp(&standby)]), way("primary", vec![tcp(&primary)])];
        assert_eq!(asked(&two).await, (vec!["primary".to_owned()], vec![format!("standby: {is_standby}")]));
        // One that does not answer is not waited for.
        standby.pause();
        let begin = Instant::now();
        assert_eq!(asked(&two).await, (vec!["primary".to_owned()], vec![]));
        assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
        standby.resume();
    }

    #[tokio::test]
    async fn a_pooler_is_told_from_the_server() {
        let cluster = Cluster::start(&[]);
        let (bouncer, by_socket) = (Bouncer::start(cluster.port()), Bouncer::start_by_socket(&cluster));
        let path = async |url: &str| {
            let place = Place::parse(url).expect("it is well formed");
            let (reached, tried) = servers(&place, &Learned::default(), Purpose::Look).await;
            reached.first().unwrap_or_else(|| panic!("{tried:?}")).path
        };
        assert_eq!(path(&cluster.url("")).await, Path::Direct);
        assert_eq!(path(&cluster.socket_url("")).await, Path::Direct);
        assert_eq!(path(&bouncer.url("")).await, Path::Pooler);
        assert_eq!(path(&bouncer.socket_url("")).await, Path::Pooler);
        assert_eq!(path(&by_socket.url("")).await, Path::Pooler);
        assert_eq!(path(&by_socket.socket_url("")).await, Path::Unknown, "nobody can tell");
    }
}
